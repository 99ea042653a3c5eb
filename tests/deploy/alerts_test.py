"""The alerts: well formed, unit-tested by promtool, about metrics that exist, and explained to who is woken up."""

import pathlib
import tempfile
import unittest

import yaml

import support

RULES = support.SOURCE / "deploy/helm/tributary/rules/tributary.yaml"
UNIT_TESTS = support.SOURCE / "tests/deploy/alerts_test.yaml"
PROMETHEUS = support.SOURCE / "deploy/prometheus/prometheus.yml"


def alerts():
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


class Alerts(unittest.TestCase):
    def test_promtool_accepts_them(self):
        result = support.run(support.need("promtool"), "check", "rules", RULES)
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertIn(f"{len(alerts())} rules found", result.stdout)

    def test_unit_tests(self):
        result = support.run(support.need("promtool"), "test", "rules", UNIT_TESTS)
        self.assertEqual(result.returncode, 0, result.stdout)

    def test_unit_tests_see_a_wrong_threshold(self):
        with tempfile.TemporaryDirectory() as folder:
            rules = RULES.read_text(encoding="utf-8").replace("tributary_kv_fullest_cache_ratio > 0.9",
                                                              "tributary_kv_fullest_cache_ratio > 0.99")
            pathlib.Path(folder, "rules.yaml").write_text(rules, encoding="utf-8")
            tests = yaml.safe_load(UNIT_TESTS.read_text(encoding="utf-8"))
            tests["rule_files"] = ["rules.yaml"]
            pathlib.Path(folder, "tests.yaml").write_text(yaml.safe_dump(tests), encoding="utf-8")
            result = support.run(support.need("promtool"), "test", "rules", pathlib.Path(folder, "tests.yaml"))
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("TributaryPagesNearlyExhausted", result.stdout)

    def test_each_is_tested_firing_and_silent(self):
        firing, silent = set(), set()
        for test in yaml.safe_load(UNIT_TESTS.read_text(encoding="utf-8"))["tests"]:
            for case in test["alert_rule_test"]:
                (firing if case.get("exp_alerts") else silent).add(case["alertname"])
        self.assertEqual(firing, set(alerts()))
        self.assertEqual(silent, set(alerts()))

    def test_each_says_what_happened_and_what_to_do(self):
        for name, rule in alerts().items():
            with self.subTest(name):
                self.assertIn(rule["labels"]["severity"], ("warning", "critical"))
                self.assertTrue(rule["annotations"]["summary"].endswith("."))
                self.assertIn("description", rule["annotations"])
                page, anchor = rule["annotations"]["runbook"].split("#")
                self.assertEqual(anchor, name.lower())
                self.assertIn(f"### {name}\n", (support.SOURCE / page).read_text(encoding="utf-8"))


class Files(unittest.TestCase):
    """What compose hands to Prometheus."""

    def test_prometheus_configuration(self):
        config = yaml.safe_load(PROMETHEUS.read_text(encoding="utf-8"))
        self.assertEqual(config["rule_files"], ["/etc/prometheus/rules/*.yaml"])
        config["rule_files"] = [str(RULES)]
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as local:
            yaml.safe_dump(config, local)
            local.flush()
            result = support.run(support.need("promtool"), "check", "config", local.name)
        self.assertEqual(result.returncode, 0, result.stdout)


if __name__ == "__main__":
    support.main()
