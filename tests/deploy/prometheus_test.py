"""Debian's Prometheus scrapes a running group: every panel of every dashboard has data during `tributary bench`.

There is no GPU here: what dcgm-exporter would say of two is served by a stand-in, from the list in docs/metrics.md.
"""

import http.server
import json
import math
import pathlib
import re
import tempfile
import threading
import unittest
import urllib.error
import urllib.parse
import urllib.request

import yaml

import metrics_doc
import support

WORKERS = 2


class GpuExporter(http.server.BaseHTTPRequestHandler):
    """The page of a dcgm-exporter."""

    def do_GET(self):
        lines = []
        for name, metric in metrics_doc.documented().items():
            if not name.startswith("DCGM_"):
                continue
            lines.append(f"# TYPE {name} {metric.type}")
            for rank in range(WORKERS):
                values = {"gpu": rank, "Hostname": "node", "pod": f"tributary-worker-{rank}"}
                assert set(values) == metric.labels, name
                labels = ",".join(f'{label}="{value}"' for label, value in values.items())
                lines.append(f"{name}{{{labels}}} {rank + 1}")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(("\n".join(lines) + "\n").encode())

    def log_message(self, *_):
        pass


class Scraped(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        program = support.need("prometheus")
        ports = support.FreePorts()
        cls.folder = tempfile.TemporaryDirectory(prefix="tributary-prometheus-")
        path = pathlib.Path(cls.folder.name)
        cls.processes = []
        cls.addClassCleanup(cls.stop)
        metrics = [ports.take() for _ in range(1 + WORKERS)]
        cls.target = f"unix:{path}/service.sock"
        workers_at = f"unix:{path}/workers.sock"
        cls.start("coordinator", support.BIN / "tributary-coordinator", f"--listen={cls.target}", "--admin-listen=",
                  f"--workers={WORKERS}", f"--worker-listen={workers_at}", f"--metrics-port={metrics[0]}",
                  "--log-format=json")
        for rank in range(WORKERS):
            cls.start(f"worker-{rank}", support.BIN / "tributary-worker", f"--coordinator={workers_at}",
                      f"--rank={rank}", "--threads=1", f"--metrics-port={metrics[1 + rank]}", "--log-format=json")
        cls.gpus = http.server.ThreadingHTTPServer(("127.0.0.1", 0), GpuExporter)
        threading.Thread(target=cls.gpus.serve_forever, daemon=True).start()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(metrics_doc.RULES)],
            "scrape_configs": [
                {"job_name": "tributary-coordinator", "static_configs": [{"targets": [f"127.0.0.1:{metrics[0]}"]}]},
                {"job_name": "tributary-worker",
                 "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in metrics[1:]]}]},
                {"job_name": "dcgm-exporter",
                 "static_configs": [{"targets": [f"127.0.0.1:{cls.gpus.server_port}"]}]},
            ],
        }
        (path / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        cls.port = ports.take()
        cls.start("prometheus", program, f"--config.file={path}/prometheus.yaml", f"--storage.tsdb.path={path}/data",
                  f"--web.listen-address=127.0.0.1:{cls.port}", "--log.level=warn")
        support.wait_until("four targets that answer",
                           lambda: len(cls.query("up == 1")) == 1 + WORKERS + 1, 60, cls.processes)
        support.wait_until("a group that serves", lambda: cls.value("min(tributary_group_ready)") == 1, 60,
                           cls.processes)
        cls.bench = cls.start("bench", support.BIN / "tributary", "bench", f"--target={cls.target}", "--duration=10m",
                              "--sequences=4", "--batch=2", "--context=256", "--q_heads=8", "--kv_heads=2",
                              "--head_dim=64")
        # Rates need two scrapes with steps in between.
        support.wait_until("steps", lambda: (cls.value("sum(rate(tributary_steps_total[10s]))") or 0) > 0, 60,
                           cls.processes)

    @classmethod
    def start(cls, name, *command):
        process = support.Process(name, command)
        cls.processes.append(process)
        return process

    @classmethod
    def stop(cls):
        for process in reversed(cls.processes):
            process.kill()
        if hasattr(cls, "gpus"):
            cls.gpus.shutdown()
            cls.gpus.server_close()
        cls.folder.cleanup()

    @classmethod
    def query(cls, expression):
        """Series of an instant query; none while Prometheus does not answer yet."""
        where = f"http://127.0.0.1:{cls.port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(where, timeout=20) as answer:
                return json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it starts
                return []
            raise AssertionError(f"{expression}\n{error.read().decode()}") from error
        except OSError:
            return []

    @classmethod
    def value(cls, expression):
        series = cls.query(expression)
        return float(series[0]["value"][1]) if series else None

    def has_data(self, expression):
        return any(math.isfinite(float(series["value"][1])) for series in self.query(expression))

    def test_every_panel_has_data_under_load(self):
        for path, dashboard in metrics_doc.dashboards().items():
            for panel in metrics_doc.panels(dashboard):
                for target in panel["targets"]:
                    expression = target["expr"].replace("$job", ".*").replace("$__rate_interval", "10s")
                    with self.subTest(path.name, panel=panel["title"], query=target["refId"]):
                        self.assertNotIn("$", expression)
                        support.wait_until(expression, lambda e=expression: self.has_data(e), 30, self.processes)
                        legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                        for series in self.query(expression):
                            missing = legend - set(series["metric"])
                            # `or vector(0)`: there is nothing to name when nothing failed.
                            self.assertTrue(not missing or not series["metric"], f"{missing}: {series['metric']}")

    def test_a_healthy_group_raises_no_alert(self):
        support.wait_until("rules", lambda: self.query("up") != [], 30, self.processes)
        firing = [series["metric"]["alertname"] for series in self.query('ALERTS{alertstate="firing"}')]
        self.assertEqual(firing, [])

    def test_promtool_finds_nothing_to_improve(self):
        promtool = support.need("promtool")
        for job in ("tributary-coordinator", "tributary-worker"):
            instance = self.query(f'up{{job="{job}"}}')[0]["metric"]["instance"]
            with urllib.request.urlopen(f"http://{instance}/metrics", timeout=20) as answer:
                page = answer.read().decode()
            result = support.run(promtool, "check", "metrics", input=page)
            self.assertEqual((result.returncode, result.stdout), (0, ""), job)


if __name__ == "__main__":
    support.main()
