"""docs/metrics.md, and what PromQL expressions refer to."""

import dataclasses
import json
import re

import yaml

import support

RULES = support.SOURCE / "deploy/helm/tributary/rules/tributary.yaml"

# Words of PromQL that look like names.
_WORDS = {"rate", "increase", "histogram_quantile", "absent", "vector", "by", "on",
          "ignoring", "group_left", "group_right", "and", "or", "unless", "without", "label_values", "irate"}
# Labels that Prometheus adds.
_TARGET_LABELS = {"job", "instance"}


@dataclasses.dataclass(frozen=True)
class Metric:
    type: str
    labels: frozenset


def documented():
    """name -> Metric, of all tables."""
    metrics = {}
    for line in (support.SOURCE / "docs/metrics.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if not line.startswith("| `") or len(cells) < 6:
            continue
        labels = frozenset(label.strip() for label in cells[3].split(",") if label.strip())
        metrics[cells[1].strip("`")] = Metric(cells[2], labels)
    return metrics


def _family(name, metrics):
    """The Metric a series belongs to, and the labels it adds; None when there is none."""
    if name in metrics:
        return metrics[name], set()
    for suffix, labels in (("_bucket", {"le"}), ("_sum", set()), ("_count", set())):
        base = name.removesuffix(suffix)
        if base != name and base in metrics and metrics[base].type in ("histogram", "summary"):
            return metrics[base], labels
    return None, set()


def problems(expression, metrics):
    """What in a PromQL expression refers to no documented metric, or to a label it does not have."""
    found = []
    allowed = set(_TARGET_LABELS)
    text = re.sub(r'"[^"]*"', '""', re.sub(r"\[[^\]]*\]", "", expression))
    for name, selector in re.findall(r"\b([A-Za-z_]\w*)\s*(\{[^}]*\})?", text):
        if name in _WORDS or "_" not in name:
            continue
        metric, extra = _family(name, metrics)
        if metric is None:
            found.append(f"unknown metric {name}")
            continue
        if metric.type == "histogram" and not extra and name in metrics:
            found.append(f"{name} is a histogram: it has no series of that name")
        labels = metric.labels | extra | _TARGET_LABELS
        allowed |= labels
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector or ""):
            if label not in labels:
                found.append(f"{name} has no label {label}")
    for group in re.findall(r"\b(?:by|on|ignoring|without|group_left)\s*\(([^)]*)\)", text):
        for label in filter(None, (word.strip() for word in group.split(","))):
            if label not in allowed:
                found.append(f"no metric of the expression has the label {label}")
    return found


def dashboards():
    """path -> dashboard."""
    return {path: json.loads(path.read_text(encoding="utf-8"))
            for path in sorted((support.SOURCE / "deploy/helm/tributary/dashboards").glob("*.json"))}


def panels(dashboard):
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def rules():
    """The alerts."""
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]
