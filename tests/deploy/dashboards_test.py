"""Dashboards and alerts ask for metrics that exist, and the alerts fire when they should."""

import re
import unittest

import yaml

import metrics_doc
import support


TESTS = support.SOURCE / "tests/deploy/alerts_test.yaml"


class Queries(unittest.TestCase):
    def setUp(self):
        self.metrics = metrics_doc.documented()
        self.assertGreater(len(self.metrics), 40)

    def test_dashboards_ask_for_documented_metrics(self):
        self.assertGreaterEqual(len(metrics_doc.dashboards()), 3)
        for path, dashboard in metrics_doc.dashboards().items():
            for panel in metrics_doc.panels(dashboard):
                self.assertTrue(panel["targets"], panel["title"])
                for target in panel["targets"]:
                    with self.subTest(path.name, panel=panel["title"]):
                        self.assertEqual(metrics_doc.problems(target["expr"], self.metrics), [], target["expr"])

    def test_alerts_ask_for_documented_metrics(self):
        for rule in metrics_doc.rules():
            with self.subTest(rule["alert"]):
                self.assertEqual(metrics_doc.problems(rule["expr"], self.metrics), [], rule["expr"])

    def test_what_is_wrong_is_found(self):
        for expression, expected in [
                ("tributary_nonsense", "unknown metric tributary_nonsense"),
                ("DCGM_FI_NONSENSE", "unknown metric DCGM_FI_NONSENSE"),
                ("sum by (uuid) (DCGM_FI_DEV_GPU_TEMP)", "no metric of the expression has the label uuid"),
                ("rate(tributary_steps_count[1m])", "unknown metric tributary_steps_count"),
                ("tributary_step_calls", "tributary_step_calls is a histogram: it has no series of that name"),
                ('tributary_kv_pages{sequence="1"}', "tributary_kv_pages has no label sequence"),
                ("sum by (cache) (tributary_kv_pages)", "no metric of the expression has the label cache"),
        ]:
            self.assertEqual(metrics_doc.problems(expression, self.metrics), [expected])

    def test_every_metric_of_ours_is_of_use(self):
        """What nobody looks at is not worth exporting; the exceptions say why."""
        unseen = {
            "tributary_kv_caches",  # `tributary topology` names them
            "tributary_worker_rank", "tributary_worker_group_size",  # to join other series with
            "tributary_worker_epoch", "tributary_worker_ready", "tributary_worker_joins_total",  # for one worker alone
        }
        text = "\n".join([target["expr"] for dashboard in metrics_doc.dashboards().values()
                          for panel in metrics_doc.panels(dashboard) for target in panel["targets"]] +
                         [rule["expr"] for rule in metrics_doc.rules()])
        ours = {name for name in self.metrics if name.startswith("tributary_")}
        self.assertEqual({name for name in ours if not re.search(rf"\b{name}(_bucket|_sum|_count)?\b", text)}, unseen)


class Form(unittest.TestCase):
    def test_dashboards_can_be_imported_anywhere(self):
        uids = set()
        for path, dashboard in metrics_doc.dashboards().items():
            uids.add(dashboard["uid"])
            variables = {variable["name"] for variable in dashboard["templating"]["list"]}
            self.assertEqual(variables, {"datasource", "job"}, path.name)
            ids = [panel["id"] for panel in dashboard["panels"]]
            self.assertEqual(len(ids), len(set(ids)), path.name)
            for panel in metrics_doc.panels(dashboard):
                with self.subTest(path.name, panel=panel["title"]):
                    self.assertEqual(panel["datasource"]["uid"], "${datasource}")
                    for target in panel["targets"]:
                        self.assertIn("$job", target["expr"])
                        self.assertTrue(target["legendFormat"])
        self.assertEqual(len(uids), len(metrics_doc.dashboards()))

    def test_panels_do_not_overlap(self):
        for path, dashboard in metrics_doc.dashboards().items():
            taken = {}
            for panel in dashboard["panels"]:
                at = panel["gridPos"]
                self.assertLessEqual(at["x"] + at["w"], 24)
                for x in range(at["x"], at["x"] + at["w"]):
                    for y in range(at["y"], at["y"] + at["h"]):
                        self.assertNotIn((x, y), taken, f"{path.name}: {panel['title']}, {taken.get((x, y))}")
                        taken[x, y] = panel["title"]


class Alerts(unittest.TestCase):
    def test_promtool_accepts_them_and_their_tests_pass(self):
        promtool = support.need("promtool")
        for command in (["check", "rules", metrics_doc.RULES], ["test", "rules", TESTS]):
            result = support.run(promtool, *command)
            self.assertEqual(result.returncode, 0, result.stdout)

    def test_alerts_ask_for_our_jobs_alone(self):
        for rule in metrics_doc.rules():
            bare = re.sub(r'\b(?:tributary|process)_\w+\{job=~"tributary-\.\*"[^}]*\}', "", rule["expr"])
            self.assertNotRegex(bare, r"\b(tributary|process)_\w+", rule["alert"])

    def test_each_alert_is_tested_both_ways(self):
        document = yaml.safe_load(TESTS.read_text(encoding="utf-8"))
        cases = [case for test in document["tests"] for case in test.get("alert_rule_test", [])]
        fires = {case["alertname"] for case in cases if case["exp_alerts"]}
        rests = {case["alertname"] for case in cases if not case["exp_alerts"]}
        names = {rule["alert"] for rule in metrics_doc.rules()}
        self.assertEqual(fires, names)
        self.assertEqual(rests, names)

    def test_each_alert_is_explained(self):
        guide = (support.SOURCE / "docs/runbook.md").read_text(encoding="utf-8")
        sections = dict(re.findall(r"(?ms)^## (\w+)\n(.*?)(?=^## |\Z)", guide))
        self.assertEqual(set(sections), {rule["alert"] for rule in metrics_doc.rules()})
        for rule in metrics_doc.rules():
            self.assertEqual(rule["annotations"]["runbook_url"], f"docs/runbook.md#{rule['alert'].lower()}")
            asked = set(re.findall(r"\b(?:tributary|process)_\w+\b", rule["expr"]))
            asked = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
            named = set(re.findall(r"`(\w+)", sections[rule["alert"]]))
            self.assertTrue(asked & named, f"{rule['alert']}: its section names none of {sorted(asked)}")
            self.assertIn(rule["labels"]["severity"], ("warning", "critical"))
            self.assertIn("summary", rule["annotations"])


if __name__ == "__main__":
    support.main()
