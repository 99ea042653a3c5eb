"""Pods of a rendered release, each in a network of its own on one bridge, as a cluster would start them.

Nothing is translated but names that a cluster's DNS would resolve: every pod has an address, and the ports of the chart are
its own. Two nodes are two pods of workers here. It takes root, to make network namespaces; elsewhere it is skipped.
"""

import os
import pathlib
import re
import tempfile
import unittest

import helm_test
import support

BRIDGE = "10.77.0.254"


def setUpModule():
    helm_test.setUpModule()


class Pods:
    """Network namespaces on a bridge, each with an address, and the processes in them."""

    def __init__(self, names):
        self._prefix = f"tributary-{os.getpid()}"
        self.addresses = {name: f"10.77.0.{index + 1}" for index, name in enumerate(names)}
        self.processes = {}
        self._made = []

    def make(self):
        self._ip("link", "add", "pods", "type", "bridge")
        self._ip("address", "add", f"{BRIDGE}/24", "dev", "pods")
        self._ip("link", "set", "pods", "up")
        for index, (name, address) in enumerate(self.addresses.items()):
            namespace = self.namespace(name)
            self._ip("netns", "add", namespace)
            self._made.append(namespace)
            self._ip("link", "add", f"pod{index}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
            self._ip("link", "set", f"pod{index}", "master", "pods", "up")
            self._ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                self._ip("-n", namespace, "link", "set", device, "up")

    @staticmethod
    def _ip(*words):
        result = support.run("ip", *words)
        if result.returncode != 0:
            raise unittest.SkipTest(f"ip {' '.join(words)}: {result.stdout.strip()}")

    def namespace(self, name):
        return f"{self._prefix}-{name}"

    def inside(self, name, command):
        return ["ip", "netns", "exec", self.namespace(name), *command]

    def remove(self):
        for process in self.processes.values():
            process.kill()
        for namespace in self._made:
            support.run("ip", "netns", "delete", namespace)
        support.run("ip", "link", "delete", "pods")


@unittest.skipUnless(os.geteuid() == 0 and support.ISOLATED in os.environ, "needs root, and a network of its own")
class Nodes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def resolved(self, text):
        """What a cluster's DNS would say of the release's services."""
        address = self.pods.addresses["coordinator"]
        return re.sub(r"(?<![\w.-])tributary(-registration)?(?=:\d)", address, text)

    def command(self, pod, one, index, settings):
        """A container's command in the pod `pod`, with its settings in a folder."""
        root = self.folder / f"{pod}-{one['name']}"
        place = root / "etc/tributary/settings"
        place.mkdir(parents=True)
        state = root / "var/lib/tributary"
        state.mkdir(parents=True)
        for file, text in settings.items():
            text = self.resolved(text).replace("/var/lib/tributary", str(state))
            (place / file).write_text(text, encoding="utf-8")
        variables = {"$(POD_IP)": self.pods.addresses[pod], "$(POD_INDEX)": str(index)}
        words = [re.sub(r"\$\(\w+\)", lambda m: variables[m[0]], word) for word in one["args"]]
        words = [self.resolved(word).replace("/etc/tributary/", f"{root}/etc/tributary/") for word in words]
        return self.pods.inside(pod, [str(support.BIN / words[0]), *words[1:]])

    def healthy(self, pod, one):
        port = one["readinessProbe"]["grpc"]["port"]
        probe = [str(support.BIN / "tributary"), "health", f"--admin={self.pods.addresses[pod]}:{port}"]
        return support.run(*self.pods.inside(pod, probe)).returncode == 0

    def test_a_group_over_two_nodes_of_two_ranks_each(self):
        documents = helm_test.objects(helm_test.CHART / "ci/cpu-values.yaml",
                                      sets=["worker.count=4", "worker.gpusPerPod=2",
                                            'worker.resources.requests.cpu="1"'])
        templates = helm_test.pod_templates(documents)
        settings = helm_test.by_kind(documents, "ConfigMap")["tributary"]["data"]
        self.pods = Pods(["coordinator", "worker-0", "worker-1", "test"])
        self.addCleanup(self.pods.remove)
        self.pods.make()
        started = [("coordinator", one, 0) for one in helm_test.containers(templates["coordinator"])]
        started += [(f"worker-{index}", one, index) for index in range(2)
                    for one in helm_test.containers(templates["worker"])]
        self.assertEqual(len(started), 5)
        for pod, one, index in started:
            name = f"{pod}-{one['name']}"
            self.pods.processes[name] = support.Process(name, self.command(pod, one, index, settings))
        running = list(self.pods.processes.values())
        for pod, one, _ in started:
            support.wait_until(f"{one['name']} of {pod} ready", lambda p=pod, o=one: self.healthy(p, o), 60, running)

        check = self.command("test", helm_test.container(templates["test"]), 0, {})
        result = support.run(*check)
        logs = "\n".join(process.output() for process in running)
        self.assertEqual(result.returncode, 0, f"{result.stdout}\n{logs}")
        self.assertIn("4 ranks", result.stdout)
        topology = support.run(*check[:4], str(support.BIN / "tributary"), "topology",
                               f"--target={self.pods.addresses['coordinator']}:7400").stdout
        for pod in ("worker-0", "worker-1"):
            self.assertIn(self.pods.addresses[pod], topology, "workers are known by their pods' addresses")

        for process in running:
            process.terminate()
        grace = templates["worker"]["spec"]["terminationGracePeriodSeconds"]
        self.assertEqual([process.wait(grace) for process in running], [0] * len(running))


if __name__ == "__main__":
    support.main(isolated=True)
