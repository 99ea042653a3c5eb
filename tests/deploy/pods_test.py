"""Pods of a rendered release as a cluster would start them: each with a network on one bridge and namespaces of its
own, each container with a read-only root, the pod's volumes at their places, and a user that may nothing.

Commands, environment, mounts and settings are those of the manifest, unchanged; names of services are in /etc/hosts,
where a cluster has DNS. Two nodes are two pods of workers here. It takes root, to make namespaces; elsewhere it is
skipped.
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

import helm_test
import support

BRIDGE = "10.77.0.254"
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
        environment = {}
        for variable in one.get("env", []):
            path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            known = {"status.podIP": self.address, "metadata.uid": f"uid-of-{self.name}", "": variable.get("value")}
            environment[variable["name"]] = known.get(path, str(index))
        words = [*one.get("command", entrypoint), *one["args"]]
        words = [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], word) for word in words]
        context = self.spec["securityContext"]
        mounts = [{"path": "/etc/hosts", "source": str(self.folder / "hosts"), "readOnly": True}]
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
            "group": context["runAsGroup"], "root": str(root), "bin": str(support.BIN.resolve())}), encoding="utf-8")
        inside = ["ip", "netns", "exec", self.namespace, "nsenter", "--target", str(self.first()), "--ipc"]
        own = ["unshare", "--mount"]
        if self.spec.get("shareProcessNamespace"):
            inside += ["--pid"]
        else:
            own += ["--pid", "--fork", "--kill-child"]
        return [*inside, *own, sys.executable, "-B", str(pathlib.Path(__file__).parent / "container.py"), str(spec)]

    def start(self, one, index):
        self.processes[one["name"]] = support.Process(f"{self.name}-{one['name']}", self.command(one, index, ENTRYPOINT))

    def run(self, one, index=0):
        """A container that ends by itself."""
        return support.run(*self.command(one, index, ENTRYPOINT))

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
                             {"/tmp", "/run/tributary", "/var/lib/tributary"})

    def test_a_group_over_two_nodes_of_two_ranks_each(self):
        documents = helm_test.objects(helm_test.CHART / "ci/cpu-values.yaml",
                                      sets=["worker.count=4", "worker.gpusPerPod=2",
                                            'worker.resources.requests.cpu="1"'])
        pods = self.make(documents, 2)
        started = [(pod, one) for name, pod in pods.items() if name != "test" for one in pod.spec["containers"]]
        self.assertEqual(len(started), 5)
        for pod, one in started:
            pod.start(one, pod.name.removeprefix("worker-"))
        self.cluster.await_ready(started)
        check = pods["test"].run(pods["test"].spec["containers"][0])
        self.assertEqual(check.returncode, 0, f"{check.stdout}\n{self.cluster.logs()}")
        self.assertIn("4 ranks", check.stdout)
        topology = support.run("ip", "netns", "exec", pods["test"].namespace, support.BIN / "tributary", "topology",
                               f"--target={pods['coordinator'].address}:7400").stdout
        first, second = (pods[f"worker-{index}"] for index in range(2))
        for pod in (first, second):
            self.assertIn(pod.address, topology, "workers are known by their pods' addresses")

        namespaces = [[os.readlink(f"/proc/{pod.program(name)}/ns/{kind}") for kind in ("ipc", "pid", "net")]
                      for pod in (first, second) for name in ("worker", "worker-1")]
        self.assertEqual(namespaces[0], namespaces[1], "ranks of a pod share memory, processes and network")
        for kind in range(3):
            self.assertNotEqual(namespaces[1][kind], namespaces[2][kind])
        self.assert_confined(first.program("worker"), 65532)
        stopped = (first, second, pods["coordinator"])
        for pod in stopped:
            pod.stop()
        self.assertEqual([code for pod in stopped for code in pod.exit_codes().values()], [0] * 5, self.cluster.logs())

    def test_one_node_with_a_host_in_the_pod(self):
        """The node pod of ci/node-values.yaml, its ranks on CPUs."""
        hosts = "[{name: host, image: a, args: [tributary, check, '--target=unix:/run/tributary/tributary.sock']}]"
        documents = helm_test.objects(
            helm_test.CHART / "ci/node-values.yaml", apis=helm_test.OPERATORS,
            sets=["worker.backend=cpu", "worker.count=3", "worker.resourceClaims=[]", "mps.enabled=false",
                  'coordinator.resources.requests.cpu="3"', f"coordinator.hostContainers={hosts}",
                  "coordinator.extraVolumes=[]"])
        pods = self.make(documents, 0)
        pod = pods["coordinator"]
        coordinator, host = pod.spec["containers"]
        pod.start(coordinator, 0)
        self.cluster.await_ready([(pod, coordinator)])
        check = pod.run(host)
        self.assertEqual(check.returncode, 0, f"{check.stdout}\n{self.cluster.logs()}")
        self.assertIn("3 ranks", check.stdout)
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
        pod.stop()
        self.assertEqual(pod.exit_codes(), {"coordinator": 0}, self.cluster.logs())


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
