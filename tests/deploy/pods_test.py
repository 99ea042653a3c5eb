"""Pods of a rendered release as a cluster would start them: each with a network on one bridge and namespaces of its
own, each container with a read-only root, the pod's volumes at their places, and a user that may nothing.

Commands, environment, mounts and settings are those of the manifest, unchanged; names of services are in /etc/hosts,
where a cluster has DNS. Two nodes are two pods of workers here. Each container's memory is limited as the manifest says,
where control groups can be made. It takes root, to make namespaces; elsewhere it is skipped.

Whatever computes on CPUs here does so on GPUs, too, where the programs are built with CUDA and the machine has GPUs: the
same cases, with the GPUs' devices in the containers.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import unittest

import control_group
import gpus
import helm_test
import support

BRIDGE = "10.77.0.254"
LAYERS = 32  # of a step that is timed: what it costs to submit one is little of it
# The images' entry point, where it is installed.
ENTRYPOINT = ["/usr/bin/tini", "-s", "-g", "--"] if shutil.which("tini") else []
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


def setUpModule():
    helm_test.setUpModule()


def must(*words):
    result = support.run(*words)
    if result.returncode != 0:
        raise unittest.SkipTest(f"{' '.join(map(str, words))}: {result.stdout.strip()}")


def children(pid):
    try:
        return [int(one) for one in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


class Pod:
    """Namespaces that its containers share, and its volumes in a folder."""

    def __init__(self, name, address, spec, folder, namespace, claimed=()):
        self.name, self.address, self.spec = name, address, spec
        self.folder = folder / name
        self.namespace = namespace
        self.processes = {}
        self._claimed = set(claimed)
        self._pause = None
        self._mounted = []
        self._limits = {}

    def make(self, config_maps, hosts):
        """The pause container, which holds the namespaces, and the volumes."""
        self.folder.mkdir()
        self._pause = support.Process(f"{self.name}-pause", [
            "ip", "netns", "exec", self.namespace, "unshare", "--ipc", "--pid", "--fork", "--kill-child", "sleep", "3600"])
        support.wait_until("the pod's first process", lambda: children(self._pause.pid()), 10, [self._pause])
        (self.folder / "hosts").write_text(hosts, encoding="utf-8")
        for volume in self.spec.get("volumes", []) + [{"name": name} for name in self._claimed]:
            place = self.folder / "volumes" / volume["name"]
            place.mkdir(parents=True)
            if "configMap" in volume:
                for file, text in config_maps[volume["configMap"]["name"]].items():
                    (place / file).write_text(text, encoding="utf-8")
                continue
            size = volume.get("emptyDir", {}).get("sizeLimit")
            if size:
                must("mount", "-t", "tmpfs", "-o", f"size={int(size[:-2]) * UNITS[size[-2:]]}", "none", place)
                self._mounted.append(place)
            group = self.spec["securityContext"]["fsGroup"]
            os.chown(place, 0, group)
            place.chmod(0o2770)

    def first(self):
        """The process id of the pause container, as the machine sees it."""
        return children(self._pause.pid())[0]

    def command(self, one, index, entrypoint):
        """A container's command line on this machine."""
        # What a sanitizer is told is the build's, and in no manifest, nor are the files that this names.
        environment = {name: value for name, value in os.environ.items() if name.endswith("SAN_OPTIONS")}
        told = re.findall(r"suppressions=([^:]+)", ":".join(environment.values()))
        for variable in one.get("env", []):
            path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            known = {"status.podIP": self.address, "metadata.uid": f"uid-of-{self.name}", "": variable.get("value")}
            environment[variable["name"]] = known.get(path, str(index))
        words = [*one.get("command", entrypoint), *one.get("args", [])]
        words = [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], word) for word in words]
        context = self.spec["securityContext"]
        mounts = [{"path": "/etc/hosts", "source": str(self.folder / "hosts"), "readOnly": True}]
        mounts += [{"path": file, "source": file, "readOnly": True} for file in told]
        mounts += [{"path": mount["mountPath"], "source": str(self.folder / "volumes" / mount["name"]),
                    "readOnly": mount.get("readOnly", False)} for mount in one.get("volumeMounts", [])]
        if "/tmp" not in [mount["path"] for mount in mounts]:
            (self.folder / f"tmp-{one['name']}").mkdir(mode=0o777, exist_ok=True)
            mounts.append({"path": "/tmp", "source": str(self.folder / f"tmp-{one['name']}")})
        root = self.folder / f"root-{one['name']}"
        root.mkdir(exist_ok=True)
        spec = self.folder / f"{one['name']}.json"
        spec.write_text(json.dumps({
            "args": words, "env": environment, "mounts": mounts, "user": context["runAsUser"],
            "group": context["runAsGroup"], "root": str(root), "bin": str(support.BIN.resolve()),
            "devices": gpus.devices() if self.has_gpus(one) else []}), encoding="utf-8")
        inside = ["ip", "netns", "exec", self.namespace, "nsenter", "--target", str(self.first()), "--ipc"]
        own = ["unshare", "--mount"]
        if self.spec.get("shareProcessNamespace"):
            inside += ["--pid"]
        else:
            own += ["--pid", "--fork", "--kill-child"]
        return [*inside, *own, sys.executable, "-B", str(pathlib.Path(__file__).parent / "container.py"), str(spec)]

    @staticmethod
    def has_gpus(one):
        """Whether the container is given the node's GPUs: by a claim, or by the device plugin."""
        resources = one.get("resources", {})
        return bool(resources.get("claims")) or "nvidia.com/gpu" in resources.get("limits", {})

    def limit(self, one):
        """The control group that holds the container to its memory; None where none can be made."""
        name = one["name"]
        memory = one.get("resources", {}).get("limits", {}).get("memory")
        if name not in self._limits:
            self._limits[name] = control_group.make(f"{self.namespace}-{name}", memory) if memory else None
        return self._limits[name]

    def start(self, one, index):
        limit = self.limit(one)
        command = self.command(one, index, ENTRYPOINT)
        self.processes[one["name"]] = support.Process(f"{self.name}-{one['name']}",
                                                      limit.within(command) if limit else command)

    def run(self, one, index=0):
        """A container that ends by itself."""
        return support.run(*self.command(one, index, ENTRYPOINT))

    def start_first(self, running):
        """Init containers that go on running, as MPS does, each until its probe finds it started."""
        for one in self.spec.get("initContainers", []):
            if one.get("restartPolicy") != "Always":
                continue
            self.start(one, 0)
            probe = {**one, "name": f"{one['name']}-probe", "args": [], **one["startupProbe"]["exec"]}
            support.wait_until(f"{one['name']} started", lambda p=probe: self.run(p).returncode == 0, 60,
                               [*running, self.processes[one["name"]]])

    def program(self, name):
        """The process id of a container's first process, as the machine sees it."""
        return children(self.processes[name].pid())[0]

    def healthy(self, one):
        probe = one["readinessProbe"]["grpc"]
        return support.run("ip", "netns", "exec", self.namespace, support.BIN / "tributary", "health",
                           f"--admin={self.address}:{probe['port']}").returncode == 0

    def stop(self):
        """SIGTERM to every container, as a cluster sends it."""
        for name in self.processes:
            os.kill(self.program(name), signal.SIGTERM)

    def exit_codes(self):
        """Of the containers, by name, within the time that a cluster would give them."""
        grace = self.spec["terminationGracePeriodSeconds"]
        return {name: process.wait(grace) for name, process in self.processes.items()}

    def replace(self):
        """Another pod in the place of one that was stopped, with its name, address and volumes; the exit codes."""
        codes = self.exit_codes()
        for name, process in list(self.processes.items()):
            process.kill()
            one = next(one for one in self.spec["containers"] if one["name"] == name)
            self.start(one, self.name.rpartition("-")[2])
        return codes

    def remove(self):
        for process in self.processes.values():
            # The kernel forgets to kill a child with its parent when the child changes its user (prctl(2)).
            for pid in children(process.pid()):
                os.kill(pid, signal.SIGKILL)
        for process in [*self.processes.values(), self._pause]:
            if process:
                process.kill()
        for place in self._mounted:
            support.run("umount", place)
        for limit in self._limits.values():
            if limit:
                limit.remove()


class Cluster:
    """Pods on a bridge."""

    def __init__(self, folder):
        self.folder = folder
        self.pods = {}
        self._made = []
        self._prefix = f"tributary-{os.getpid()}"

    def make(self, specs, config_maps, names, claimed=()):
        """Pods by name, of the specifications; `names` says at which pod each service is found."""
        must("ip", "link", "add", "pods", "type", "bridge")
        must("ip", "address", "add", f"{BRIDGE}/24", "dev", "pods")
        must("ip", "link", "set", "pods", "up")
        addresses = {name: f"10.77.0.{index + 1}" for index, name in enumerate(specs)}
        hosts = "127.0.0.1 localhost\n" + "".join(f"{addresses[pod]} {name}\n" for name, pod in names.items())
        for index, (name, spec) in enumerate(specs.items()):
            namespace = f"{self._prefix}-{name}"
            must("ip", "netns", "add", namespace)
            self._made.append(namespace)
            must("ip", "link", "add", f"pod{index}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
            must("ip", "link", "set", f"pod{index}", "master", "pods", "up")
            must("ip", "-n", namespace, "address", "add", f"{addresses[name]}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                must("ip", "-n", namespace, "link", "set", device, "up")
            self.pods[name] = Pod(name, addresses[name], spec, self.folder, namespace,
                                  claimed if name == "coordinator" else ())
            self.pods[name].make(config_maps, hosts)

    def await_ready(self, started):
        running = [process for pod in self.pods.values() for process in pod.processes.values()]
        for pod, one in started:
            support.wait_until(f"{one['name']} of {pod.name} ready", lambda p=pod, o=one: p.healthy(o), 60, running)

    def logs(self):
        return "\n".join(f"--- {process.name}\n{process.output()}" for pod in self.pods.values()
                         for process in pod.processes.values())

    def remove(self):
        for pod in self.pods.values():
            pod.remove()
        for index, namespace in enumerate(self._made):
            # A link goes with its namespace, but some time after; the next cluster's have the same names.
            support.run("ip", "link", "delete", f"pod{index}")
            support.run("ip", "netns", "delete", namespace)
        support.run("ip", "link", "delete", "pods")


def status(pid):
    """Fields of /proc/PID/status."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


@unittest.skipUnless(os.geteuid() == 0 and support.ISOLATED in os.environ, "needs root, and namespaces of its own")
class Nodes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.cluster = Cluster(pathlib.Path(folder.name))
        self.addCleanup(self.cluster.remove)

    def make(self, documents, count):
        """The pods of a release whose StatefulSet of workers has `count`."""
        templates = helm_test.pod_templates(documents)
        sets = helm_test.by_kind(documents, "StatefulSet")
        claims = [one["metadata"]["name"] for one in
                  sets["tributary-coordinator"]["spec"].get("volumeClaimTemplates", [])]
        specs = {"coordinator": templates["coordinator"]["spec"]}
        specs |= {f"worker-{index}": templates["worker"]["spec"] for index in range(count)}
        context = templates["coordinator"]["spec"]["securityContext"]
        specs["test"] = {"securityContext": context, **templates["test"]["spec"]}
        maps = {name: one["data"] for name, one in helm_test.by_kind(documents, "ConfigMap").items()}
        services = [name for name in helm_test.by_kind(documents, "Service") if not name.endswith("-metrics")]
        self.cluster.make(specs, maps, {name: "coordinator" for name in services if "worker" not in name}, claims)
        return self.cluster.pods

    def assert_confined(self, pid, user):
        """The process may do nothing beyond its user, and writes nowhere but in its volumes."""
        of_process = status(pid)
        self.assertEqual(of_process["Uid"].split(), [str(user)] * 4)
        self.assertEqual(of_process["NoNewPrivs"], "1")
        self.assertEqual([int(of_process[kind], 16) for kind in ("CapEff", "CapPrm", "CapBnd")], [0, 0, 0])
        mounts = [line.split() for line in pathlib.Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
        writable = {one[4] for one in mounts if "rw" in one[5].split(",")}
        self.assertLessEqual({path for path in writable if not path.startswith(("/dev/", "/proc"))},
                             {"/tmp", "/run/tributary", "/run/nvidia-mps", "/var/lib/tributary"})

    def assert_limited(self, pod, one):
        """The container's processes may take the memory that the manifest says."""
        limit = pod.limit(one)
        if limit is None:
            print("memory is not limited: no control group can be made", file=sys.stderr)
            return
        self.assertEqual(limit.bytes(), control_group.in_bytes(one["resources"]["limits"]["memory"]))
        self.assertIn(pod.program(one["name"]), limit.processes())

    def group_of_pods(self, device, count, ranks):
        """A coordinator's pod, and `count` pods with so many ranks each."""
        documents = helm_test.objects(
            helm_test.CHART / "ci/cpu-values.yaml",
            sets=[f"worker.count={count * ranks}", f"worker.gpusPerPod={ranks}", 'worker.resources.requests.cpu="1"',
                  *gpus.values(device)])
        pods = self.make(documents, count)
        started = [(pod, one) for name, pod in pods.items() if name != "test" for one in pod.spec["containers"]]
        self.assertEqual(len(started), 1 + count * ranks)
        for pod, one in started:
            pod.start(one, pod.name.removeprefix("worker-"))
        self.cluster.await_ready(started)
        check = pods["test"].run(pods["test"].spec["containers"][0])
        self.assertEqual(check.returncode, 0, f"{check.stdout}\n{self.cluster.logs()}")
        self.assertIn(f"{count * ranks} ranks", check.stdout)
        topology = self.asked("topology")
        workers = [pods[f"worker-{index}"] for index in range(count)]
        for pod in workers:
            self.assertIn(pod.address, topology, "workers are known by their pods' addresses")
            self.assert_limited(pod, pod.spec["containers"][0])
        self.assertIn("partials meet in device memory, by direct" if device == "gpu" else
                      "partials meet in host memory, by Gloo over TCP", topology)

        names = [one["name"] for one in workers[0].spec["containers"]]
        namespaces = [[os.readlink(f"/proc/{pod.program(name)}/ns/{kind}") for kind in ("ipc", "pid", "net")]
                      for pod in workers for name in names]
        self.assertEqual(namespaces[0], namespaces[1], "ranks of a pod share memory, processes and network")
        for one, other in zip(namespaces[::ranks], namespaces[ranks::ranks]):
            for kind in range(3):
                self.assertNotEqual(one[kind], other[kind])
        self.assert_confined(workers[0].program("worker"), 65532)
        stopped = (*workers, pods["coordinator"])
        for pod in stopped:
            pod.stop()
        self.assertEqual([code for pod in stopped for code in pod.exit_codes().values()], [0] * len(started),
                         self.cluster.logs())

    def test_a_group_over_two_nodes_of_two_ranks_each(self):
        self.group_of_pods("cpu", count=2, ranks=2)

    def test_a_group_of_two_ranks_of_one_pod_with_a_gpu_each(self):
        gpus.need(2)
        self.group_of_pods("gpu", count=1, ranks=2)

    def round_trip(self, command, what):
        """Runs a host that submits steps to a session; says the median of a step in microseconds for each layer."""
        memory = "device" if self.device == "gpu" else "host"
        done = command(["bench", "--session", f"--session_memory={memory}", f"--layers={LAYERS}", "--sequences=1", "--batch=1",
                        "--context=1024", "--duration=2s", "--json"])
        self.assertEqual(done.returncode, 0, f"{done.stdout}\n{self.cluster.logs()}")
        result = json.loads(done.stdout[done.stdout.index("{"):])
        self.assertEqual(result["errors"], {}, done.stdout)
        self.assertGreater(result["steps"], 0)
        median = result["step_latency_seconds"]["p50"] * 1e6 / LAYERS
        print(f"a session's round trip {what}, {self.device}: {median:.1f} us per layer", file=sys.stderr)

    def without_containers(self, ranks, settings, mps):
        """The same service and host as processes of this machine."""
        socket = f"unix:{self.cluster.folder}/own.sock"
        environment = dict(os.environ)
        if mps:  # one of this machine's own: the pod's serves its user alone
            pipes = self.cluster.folder / "own-mps"
            pipes.mkdir()
            environment |= {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(pipes)}
            control = support.Process("own-mps", ["nvidia-cuda-mps-control", "-f"], env=environment)
            self.addCleanup(control.kill)
            support.wait_until("MPS", lambda: (pipes / "control").exists(), 30, [control])
        device = ["--device=cuda"] if self.device == "gpu" else [f"--threads={settings.get('threads', 0)}"]
        service = support.Process("own", [
            support.BIN / "tributary-coordinator", f"--listen={socket}", "--admin_listen=", "--worker_listen=",
            f"--embedded_workers={ranks}", *device], env=environment)
        self.addCleanup(service.kill)
        program = support.BIN / "tributary"
        support.wait_until("the service without containers", lambda: support.run(
            program, "health", f"--target={socket}").returncode == 0, 60, [service])
        self.round_trip(lambda words: support.run(program, *words, f"--target={socket}", env=environment),
                        "without containers" + (" with MPS" if mps else ""))

    def node_pod(self, device, ranks, mps=False):
        """The node pod of ci/node-values.yaml, with a host in the pod."""
        self.device = device
        socket = "unix:/run/tributary/tributary.sock"
        hosts = f"[{{name: host, image: a, args: [tributary, check, '--target={socket}']}}]"
        documents = helm_test.objects(
            helm_test.CHART / "ci/node-values.yaml", apis=helm_test.OPERATORS,
            sets=[f"worker.count={ranks}", f"mps.enabled={str(mps).lower()}",
                  f'coordinator.resources.requests.cpu="{ranks}"', f"coordinator.hostContainers={hosts}",
                  "coordinator.extraVolumes=[]",
                  *(["worker.backend=cpu", "worker.resourceClaims=[]"] if device == "cpu" else [])])
        pods = self.make(documents, 0)
        pod = pods["coordinator"]
        coordinator, host = pod.spec["containers"]
        pod.start_first([])
        pod.start(coordinator, 0)
        self.cluster.await_ready([(pod, coordinator)])
        self.assert_limited(pod, coordinator)
        check = pod.run(host)
        self.assertEqual(check.returncode, 0, f"{check.stdout}\n{self.cluster.logs()}")
        self.assertIn(f"{ranks} ranks", check.stdout)
        if ranks > 1:
            self.assertIn("partials meet in device memory, by direct" if device == "gpu" else
                          "partials meet in the memory of one process", self.asked("topology"))
        self.round_trip(lambda words: pod.run({**host, "name": "bench", "args": [
            "tributary", *words, f"--target={socket}"]}), "in the node pod" + (" with MPS" if mps else ""))
        # A side container sees the service's processes, its socket and its memory, and runs as its user.
        looks = {**host, "name": "looks", "args": [
            "/bin/sh", "-c", "cat /proc/[0-9]*/comm; stat -c '%a %u' /run/tributary/tributary.sock; "
                             "df --output=size /dev/shm; id -u; touch /usr/x /etc/x /run/x || true"]}
        seen = pod.run(looks).stdout
        self.assertIn("tributary-coord", seen)
        self.assertIn("600 65532", seen)
        self.assertIn(str(16 << 20), seen.split(), "KiB of coordinator.shmSize")
        self.assertIn("65532", seen.split())
        self.assertEqual(seen.count("Read-only file system"), 3, seen)
        self.assert_confined(pod.program("coordinator"), 65532)
        namespaces = [os.readlink(f"/proc/{pid}/ns/pid") for pid in (pod.program("coordinator"), pod.first())]
        self.assertEqual(namespaces[0], namespaces[1])
        os.kill(pod.program("coordinator"), signal.SIGTERM)
        self.assertEqual(pod.processes["coordinator"].wait(pod.spec["terminationGracePeriodSeconds"]), 0,
                         self.cluster.logs())
        if mps:
            os.kill(pod.program("mps"), signal.SIGTERM)
        maps = helm_test.by_kind(documents, "ConfigMap")["tributary"]["data"]
        self.without_containers(ranks, helm_test.yaml.safe_load(maps["coordinator.yaml"]), mps)

    def test_one_node_with_a_host_in_the_pod(self):
        self.node_pod("cpu", ranks=3)

    def test_one_node_with_gpus_and_a_host_in_the_pod(self):
        self.node_pod("gpu", ranks=min(2, gpus.need(1)))

    def test_one_node_with_gpus_under_mps_and_a_host_in_the_pod(self):
        ranks = min(2, gpus.need(1))
        gpus.need_mps()
        self.node_pod("gpu", ranks=ranks, mps=True)

    def asked(self, *words):
        """What `tributary` says in the pod of tests."""
        test = self.cluster.pods["test"]
        target = f"--target={self.cluster.pods['coordinator'].address}:7400"
        return support.run("ip", "netns", "exec", test.namespace, support.BIN / "tributary", *words, target).stdout

    def has_every_copy(self):
        statistics = json.loads(self.asked("topology", "--json") or "{}")
        return all(int(value) == 0 for value in find(statistics, {"pages_restoring", "pages_without_replica"}))

    def test_an_upgrade_replaces_pod_after_pod_and_loses_nothing(self):
        """As StatefulSets replace pods, with calls all the while."""
        documents = helm_test.objects(helm_test.CHART / "ci/cpu-values.yaml",
                                      sets=["worker.count=2", "coordinator.settings.replicas=1",
                                            'worker.resources.requests.cpu="1"'])
        workers = helm_test.by_kind(documents, "StatefulSet")["tributary-worker"]["spec"]
        self.assertEqual(workers["updateStrategy"]["type"], "RollingUpdate")
        pods = self.make(documents, 2)
        started = [(pod, pod.spec["containers"][0]) for name, pod in pods.items() if name != "test"]
        for pod, one in started:
            pod.start(one, pod.name.rpartition("-")[2])
        self.cluster.await_ready(started)
        load = support.Process("load", [
            "ip", "netns", "exec", pods["test"].namespace, support.BIN / "tributary", "bench", "--shm=false", "--layers=1",
            "--context=256", "--sequences=2", "--batch=2", "--duration=10m",
            f"--target={pods['coordinator'].address}:7400"])
        self.addCleanup(load.kill)
        pods["test"].processes["load"] = load
        support.wait_until("sequences", lambda: "256" in self.asked("topology", "--sequences"), 30, [load])
        # A change of both settings replaces the coordinator and the last worker at the same time.
        for names in (["coordinator", "worker-1"], ["worker-0"], ["coordinator"]):
            support.wait_until("every copy", self.has_every_copy, 60, [load])
            for name in names:
                pods[name].stop()
            codes = [code for name in names for code in pods[name].replace().values()]
            self.assertEqual(codes, [0] * len(names), self.cluster.logs())
            self.cluster.await_ready(started)
        load.terminate(signal.SIGINT)
        self.assertEqual(load.wait(60), 0, self.cluster.logs())
        self.assertIn("no errors", load.output())


def find(value, names):
    """The values of those names, wherever in a JSON they are."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in names:
                yield inner
            else:
                yield from find(inner, names)
    elif isinstance(value, list):
        for inner in value:
            yield from find(inner, names)


if __name__ == "__main__":
    support.main(isolated=True)
