"""deploy/monitoring: files that load, and name only metrics and labels that the server has."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from octavo.metrics import Counter, Histogram
from octavo.metrics.names import METRICS

FOLDER = Path(__file__).resolve().parents[3] / "deploy/monitoring"
DOCKER = FOLDER.parent / "docker"
promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
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


def checked(kind, file):
    return subprocess.run(["promtool", "check", kind, file], capture_output=True, text=True, check=False)


@promtool
def test_promtool_reads_the_configurations_and_the_rules(tmp_path):
    for name in ("prometheus.yml", "alerts.yml"):
        shutil.copy(FOLDER / name, tmp_path)
    assert checked("config", tmp_path / "prometheus.yml").returncode == 0
    shutil.copy(DOCKER / "prometheus.yml", tmp_path / "prometheus.yml")
    done = checked("config", tmp_path / "prometheus.yml")
    assert (done.returncode, "6 rules found" in done.stdout) == (0, True)


@promtool
def test_promtool_parses_every_expression_of_the_dashboard(tmp_path):
    """Grafana's variables are filled in as it does."""

    def check(expression):
        for variable, value in (("$__rate_interval", "1m"), ("$__range", "1h"), ("$__interval", "1m")):
            expression = expression.replace(variable, value)
        expression = re.sub(r"\$\{?\w+\}?", "x", expression)
        rules = {"groups": [{"name": "g", "rules": [{"record": "a", "expr": expression}]}]}
        (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules), encoding="utf-8")
        return checked("rules", tmp_path / "rules.yml").returncode

    found = {expression for expression in expressions() if not expression.startswith("label_values(")}
    assert len(found) > 30
    assert [expression for expression in sorted(found) if check(expression)] == []
    assert check("sum(rate(a[1m])) by") != 0


def test_grafana_is_provisioned_with_what_compose_mounts():
    provisioning = FOLDER / "grafana/provisioning"
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    [provider] = yaml.safe_load((provisioning / "dashboards/octavo.yaml").read_text())["providers"]
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["../monitoring/grafana/provisioning"] == "/etc/grafana/provisioning"
    assert Path(mounts["../monitoring/grafana-dashboard.json"]).parent == Path(provider["options"]["path"])
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in mounts.values()
    assert (source["type"], source["isDefault"], provider["type"]) == ("prometheus", True, "file")
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    [variable] = [v for v in dashboard()["templating"]["list"] if v["type"] == "datasource"]
    assert (variable["name"], variable["query"]) == ("datasource", source["type"])
    [job] = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    assert target == "octavo:8000" and "--open-monitoring" in services["octavo"]["command"]
    assert job["job_name"] == "octavo", "the alerts ask for it"
