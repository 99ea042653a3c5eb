"""Spans and metrics of a running group, as an OpenTelemetry collector gets them."""

import http.server
import json
import pathlib
import tempfile
import threading
import unittest

import support


class Collector(http.server.ThreadingHTTPServer):
    """Keeps what is sent to /v1/traces and /v1/metrics."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans, self.metrics = {}, {}  # by service: spans, names of metrics
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def endpoint(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def take(self, path, body):
        kind, scope, items = {"/v1/traces": ("resourceSpans", "scopeSpans", "spans"),
                              "/v1/metrics": ("resourceMetrics", "scopeMetrics", "metrics")}[path]
        for of_resource in body[kind]:
            attributes = {one["key"]: one["value"]["stringValue"] for one in of_resource["resource"]["attributes"]}
            found = [item for of_scope in of_resource[scope] for item in of_scope[items]]
            with self.lock:
                if kind == "resourceSpans":
                    self.spans.setdefault(attributes["service.name"], []).extend(found)
                else:
                    names = {metric["name"] for metric in found}
                    self.metrics.setdefault(attributes["service.name"], set()).update(names)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.server.take(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


class Sent(unittest.TestCase):
    def test_a_call_is_one_trace_over_both_programs(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        socket = f"unix:{pathlib.Path(folder.name) / 'socket'}"
        worker_port = support.FreePorts().take()
        collector = Collector()
        self.addCleanup(collector.server_close)
        self.addCleanup(collector.shutdown)
        common = [f"--otlp_endpoint={collector.endpoint()}", "--otlp_interval=200ms"]
        started = [
            support.Process("coordinator", [support.BIN / "tributary-coordinator", f"--listen={socket}", "--workers=1",
                                            f"--worker_listen=127.0.0.1:{worker_port}", "--admin_listen=127.0.0.1:0",
                                            "--trace_sample=1", *common]),
            support.Process("worker", [support.BIN / "tributary-worker", f"--coordinator=127.0.0.1:{worker_port}",
                                       "--threads=1", *common])]
        for process in started:
            self.addCleanup(process.kill)
        health = [support.BIN / "tributary", "health", f"--target={socket}"]
        support.wait_until("ready", lambda: support.run(*health).returncode == 0, 60, started)
        check = support.run(support.BIN / "tributary", "check", f"--target={socket}")
        self.assertEqual(check.returncode, 0, check.stdout)
        for process in reversed(started):
            process.terminate()
        self.assertEqual([process.wait(60) for process in started], [0, 0])
        logs = "\n".join(process.output() for process in started)
        self.assertNotIn("otlp", logs, "nothing went wrong")
        # The worker may have dialled before the coordinator listened, of which it warns.
        of_the_end = started[0].output() + started[1].output().partition("draining")[2]
        self.assertNotIn(" warning ", of_the_end, "an end in order warns of nothing")
        programs = ("tributary-coordinator", "tributary-worker")
        for name, metric in zip(programs, ("tributary_steps_total", "tributary_worker_steps_total")):
            self.assertIn(metric, collector.metrics[name])
            self.assertIn("tributary_build_info", collector.metrics[name])
        of_coordinator, of_worker = (collector.spans[name] for name in programs)
        steps = {span["spanId"]: span for span in of_coordinator if span["name"] == "step"}
        attended = [span for span in of_worker if span["name"] == "attend"]
        self.assertTrue(attended)
        by_id = {span["spanId"]: span for span in of_worker}
        calls = {span["traceId"] for span in of_coordinator if span["name"] in ("Attend", "AttendStream")}
        self.assertTrue(calls & {span["traceId"] for span in attended})
        for span in attended:
            step = steps[by_id[span["parentSpanId"]]["parentSpanId"]]
            self.assertEqual(span["traceId"], step["traceId"], "one trace over both")


if __name__ == "__main__":
    support.main()
