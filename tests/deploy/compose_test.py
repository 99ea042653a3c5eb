"""compose.yaml: accepted by docker-compose, hardened, and its cpu profile serves when started as processes."""

import functools
import json
import os
import tempfile
import unittest
import urllib.request

import yaml

import support
from topology import Topology

COMPOSE = support.SOURCE / "deploy/compose.yaml"


@functools.lru_cache(maxsize=None)
def config(text, variables):
    """(exit code, stdout, stderr) of `docker-compose config`, which lists the services of all profiles."""
    program = support.need("docker-compose")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=COMPOSE.parent) as file:
        file.write(text)
        file.flush()
        result = support.subprocess.run([program, "-f", file.name, "config"], capture_output=True, text=True,
                                        check=False, timeout=60, env={**os.environ, **dict(variables)})
    return result.returncode, result.stdout, result.stderr


def resolved(*profiles, text=None, variables=()):
    """What docker-compose makes of the file, with the services of the profiles: (document, "") or (None, complaint)."""
    code, document, complaint = config(text or COMPOSE.read_text(encoding="utf-8"), variables)
    if code != 0:
        return None, complaint
    document = yaml.safe_load(document)
    document["services"] = {name: service for name, service in document["services"].items()
                            if set(service["profiles"]) & set(profiles)}
    return document, ""


class File(unittest.TestCase):
    def services(self, *profiles, **options):
        document, complaint = resolved(*profiles, **options)
        self.assertIsNotNone(document, complaint)
        return document["services"]

    def test_profiles_choose_services(self):
        workers = [f"worker-{i}" for i in range(4)]
        self.assertEqual(sorted(self.services("cpu")), ["coordinator", *workers])
        self.assertEqual(sorted(self.services("gpu")), ["gpu-coordinator", *[f"gpu-{name}" for name in workers]])
        self.assertEqual(sorted(self.services("node")), ["node"])
        self.assertEqual(sorted(self.services("host")), ["node", "node-host"])

    def test_own_services_are_hardened(self):
        for name, service in self.services("cpu", "gpu", "host").items():
            with self.subTest(name):
                self.assertTrue(service["read_only"])
                self.assertEqual(service["cap_drop"], ["ALL"])
                self.assertIn("no-new-privileges:true", service["security_opt"])
                self.assertEqual(service["stop_signal"], "SIGTERM")
                self.assertNotIn("privileged", service)
                if name != "node-host":  # what runs there is the user's
                    self.assertIn("healthcheck", service)
                    self.assertIn("stop_grace_period", service)

    def test_ports_are_published_on_loopback_only(self):
        for name, service in self.services("cpu", "gpu", "host", "metrics").items():
            for port in service.get("ports", []):
                self.assertTrue(str(port).startswith("127.0.0.1:"), f"{name}: {port}")

    def test_every_image_is_ours_or_pinned(self):
        for name, service in self.services("cpu", "gpu", "node", "metrics").items():
            if "build" not in service:
                self.assertRegex(service["image"], r":v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}$", name)

    def test_each_gpu_worker_has_a_gpu_of_its_own(self):
        gpus = []
        for name, service in self.services("gpu").items():
            if name == "gpu-coordinator":
                continue
            devices = service["deploy"]["resources"]["reservations"]["devices"]
            self.assertEqual([d["capabilities"] for d in devices], [["gpu"]])
            gpus += devices[0]["device_ids"]
            self.assertEqual(service["shm_size"], "1gb")
        self.assertEqual(gpus, ["0", "1", "2", "3"])

    def test_gpu_workers_and_their_coordinator_agree_on_the_device(self):
        for name, service in self.services("gpu").items():
            self.assertIn("--device=cuda", service["command"], name)
        for name, service in self.services("cpu").items():
            self.assertNotIn("--device=cuda", service["command"], name)

    def test_group_size_is_one_variable(self):
        services = self.services("gpu", variables=(("TRIBUTARY_WORKERS", "2"),))
        self.assertIn("--workers=2", services["gpu-coordinator"]["command"])
        self.assertIn("--world_size=2", services["gpu-worker-0"]["command"])

    def test_any_number_of_gpus_in_one_process(self):
        node = self.services("node", variables=(("TRIBUTARY_GPUS", "8"),))["node"]
        self.assertIn("--embedded_workers=8", node["command"])
        self.assertIn("--device=cuda", node["command"])
        device, = node["deploy"]["resources"]["reservations"]["devices"]
        self.assertIn(device["count"], ("all", -1))

    def test_a_host_shares_what_cuda_asks_for(self):
        services = self.services("host")
        node, host = services["node"], services["node-host"]
        self.assertEqual((node["ipc"], host["ipc"], host["pid"]), ("shareable", "service:node", "service:node"))
        self.assertEqual(node["volumes"], host["volumes"])
        self.assertIn("node-run:/run/tributary", " ".join(str(one) for one in node["volumes"]))
        self.assertEqual(host["user"], "65532:65532")
        with_mps = self.services("host", variables=(("TRIBUTARY_MPS", "/tmp/nvidia-mps"), ("TRIBUTARY_IPC", "host")))
        self.assertEqual(with_mps["node"]["ipc"], "host")
        self.assertTrue(any(str(one).startswith("/tmp/nvidia-mps:") for one in with_mps["node-host"]["volumes"]))

    def test_ranks_are_the_services_own(self):
        for name, service in self.services("cpu", "gpu").items():
            if name.endswith("coordinator"):
                continue
            self.assertIn("--coordinator=coordinator:7402", service["command"])
            self.assertIn(f"--rank={name.rsplit('-', 1)[1]}", service["command"])
            self.assertIn(f"--host={name}", service["command"])

    def test_mistakes_are_refused(self):
        text = COMPOSE.read_text(encoding="utf-8")
        for old, new, complaint in [
                ("  stop_grace_period: 40s", "  stop_grace_perio: 40s", "Unsupported config option"),
                ("x-cpu-worker: &cpu-worker", "x-cpu-worker: &cpu-workers", "undefined alias"),
                ("depends_on: [coordinator]", "depends_on: [nobody]", "undefined"),
        ]:
            with self.subTest(new):
                self.assertIn(old, text)
                document, said = resolved("cpu", text=text.replace(old, new))
                self.assertIsNone(document)
                self.assertIn(complaint, said)

    def test_prometheus_takes_its_configuration(self):
        config = yaml.safe_load((COMPOSE.parent / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
        self.assertEqual(config["rule_files"], ["/etc/prometheus/rules/*.yaml"])
        mounts = self.services("metrics")["prometheus"]["volumes"]
        rules = next(mount.split(":")[0] for mount in mounts if ":/etc/prometheus/rules:" in mount)
        config["rule_files"] = [f"{rules}/*.yaml"]
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as local:
            yaml.safe_dump(config, local)
            local.flush()
            result = support.run(support.need("promtool"), "check", "config", local.name)
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertIn("SUCCESS: 1 rule files found", result.stdout)

    def test_prometheus_scrapes_every_service(self):
        config = yaml.safe_load((COMPOSE.parent / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
        scraped = {name: job["dns_sd_configs"][0]["port"] for job in config["scrape_configs"]
                   for name in job["dns_sd_configs"][0]["names"]}
        for name, service in self.services("cpu", "gpu", "node").items():
            aliases = service.get("networks", {}).get("default", {}).get("aliases", [name])
            port = next(int(word.split("=")[1]) for word in service["command"] if word.startswith("--metrics_port="))
            self.assertEqual([scraped[alias] for alias in aliases], [port], name)

    def test_yamllint(self):
        result = support.run(support.need("yamllint"), "--strict", COMPOSE, cwd=support.SOURCE)
        self.assertEqual(result.returncode, 0, result.stdout)


class CpuProfile(unittest.TestCase):
    """The services of the cpu profile as processes, with the commands and health checks of the file."""

    def setUp(self):
        document, complaint = resolved("cpu")
        self.assertIsNotNone(document, complaint)
        self.topology = Topology(document["services"])
        self.addCleanup(self.topology.kill)

    def cli(self, *words):
        result = support.run(*self.topology.local("coordinator", ["tributary", *words]))
        self.assertEqual(result.returncode, 0, f"{words}: {result.stdout}")
        return result.stdout

    def test_serves_and_ends_cleanly(self):
        self.topology.start("coordinator")
        support.wait_until("the coordinator alive", lambda: "liveness" in self.health_of_coordinator(), 20,
                           [self.topology.processes["coordinator"]])
        self.assertFalse(self.topology.healthy("coordinator"), "ready without workers")
        for service in self.topology.services:
            if service != "coordinator":
                self.topology.start(service)
        self.topology.wait_until_healthy(60)

        group = json.loads(self.cli("topology", "--target=coordinator:7400", "--json"))
        self.assertEqual(len(group["workers"]), 4)
        self.assertTrue(all(worker["connected"] for worker in group["workers"]), group)

        report = json.loads(self.cli("bench", "--target=coordinator:7400", "--shm=false", "--duration=500ms",
                                     "--warmup=0s", "--context=256", "--layers=1", "--sequences=2", "--batch=2",
                                     "--json"))
        self.assertGreater(report["requests"], 0, report)
        self.assertEqual(report["errors"], {}, report)

        for service in self.topology.services:
            port = self.topology.port(service, 9464)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
                self.assertIn("tributary_build_info{", page.read().decode(), service)

        codes = self.topology.stop()
        self.assertEqual(codes, {service: 0 for service in self.topology.services},
                         "\n".join(p.output() for p in self.topology.processes.values()))

    def health_of_coordinator(self):
        test = self.topology.services["coordinator"]["healthcheck"]["test"]
        lines = support.run(*self.topology.local("coordinator", test[1:])).stdout.splitlines()
        return [line.split()[0] for line in lines if " SERVING" in line]


class HostProfile(unittest.TestCase):
    """The coordinator of the profile with CPU workers for its GPUs, and the host's command beside it."""

    def test_the_host_finds_the_service_by_its_socket(self):
        document, complaint = resolved("host", variables=(("TRIBUTARY_GPUS", "3"),))
        self.assertIsNotNone(document, complaint)
        services = document["services"]
        with tempfile.TemporaryDirectory() as folder:
            def here(words):
                return [word.replace("/run/tributary", folder) for word in words if word != "--device=cuda"]

            host = services.pop("node-host")["command"]
            services["node"]["command"] = here(services["node"]["command"])
            topology = Topology(services)
            self.addCleanup(topology.kill)
            topology.start_in_order()
            topology.wait_until_healthy(60)
            words = host.split() if isinstance(host, str) else host
            result = support.run(*topology.local("node", here(words)))
            self.assertEqual(result.returncode, 0, result.stdout)
            self.assertIn("3 ranks", result.stdout)
            self.assertEqual(topology.stop(), {"node": 0})


if __name__ == "__main__":
    support.main(isolated=True)
