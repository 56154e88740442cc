"""deploy/monitoring: files that load, and name only metrics and labels that the server has."""

import json
import re
from pathlib import Path

import pytest
import yaml

from octavo.metrics import Counter, Histogram
from octavo.metrics.names import METRICS

FOLDER = Path(__file__).resolve().parents[3] / "deploy/monitoring"
LABELS = {"model_name", "engine", "instance", "job", "le"}


def known_names():
    names = {}
    for name, row in METRICS.items():
        full = row.prefix + name
        endings = (
            ("_bucket", "_sum", "_count")
            if row.kind is Histogram
            else ("_total",)
            if row.kind is Counter
            else ("",)
        )
        names |= {full + ending: {*row.labels, *LABELS} for ending in endings}
    return names


def dashboard():
    return json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))


def expressions():
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (
        variable["definition"] for variable in dashboard()["templating"]["list"] if "definition" in variable
    )
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_expressions_name_what_exists(expression):
    names = known_names()
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", expression)
    used = set(re.findall(r"(?<![\w:$])(?:vllm:\w+|http_\w+)", bare))
    assert used <= set(names) or expression.startswith("up"), used - set(names)
    labels = set(re.findall(r"(\w+)\s*=~?", bare)) | {
        label.strip() for group in re.findall(r"by \(([^)]*)\)", bare) for label in group.split(",")
    }
    allowed = set.union(LABELS, *(names[name] for name in used))
    assert labels <= allowed, labels - allowed
    assert bare.count("(") == bare.count(")")
    assert bare.count("{") == bare.count("}")


def test_the_dashboard_is_whole():
    board = dashboard()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    plots = [panel for panel in board["panels"] if panel["type"] == "timeseries"]
    assert len(plots) == 20
    for panel in plots:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])
        assert panel["datasource"]["uid"] == "${datasource}"


def test_prometheus_reads_the_rules_and_the_page():
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    [job] = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert [(FOLDER / name).is_file() for name in config["rule_files"]] == [True]
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["annotations"]["summary"]
