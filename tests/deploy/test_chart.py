"""deploy/helm/octavo: rendered by Helm's own engine, judged by the schemas of Kubernetes, and by octavo."""

import re
import signal
from pathlib import Path

import httpx
import pytest
import yaml

from octavo.cli.main import make_parser
from octavo.cli.serve import configs
from octavo.metrics.names import METRICS
from octavo.serving.middleware.stack import build_stack
from octavo.serving.registry import load_routes
from tests.served_process import ServeProcess

helm = pytest.importorskip("helm_python")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

CHART = Path(__file__).parents[2] / "deploy/helm/octavo"
KEYS = {"auth": {"keys": ["first", "second"]}}
ALL = {
    **KEYS,
    "gpus": 2,
    "replicas": 3,
    "config": {"max_model_len": 64, "served_model_name": ["one"]},
    "hubTokenSecret": "hub",
    "models": {"persistence": True, "storageClass": "fast"},
    "kernels": {"existingClaim": "mine"},
    "resources": {"limits": {"memory": "8Gi"}},
    "extraEnv": [{"name": "A", "value": "b"}],
    "podAnnotations": {"a": "b"},
    "imagePullSecrets": [{"name": "r"}],
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}
CASES = {
    "least": KEYS,
    "all": ALL,
    "own secret": {"auth": {"existingSecret": "mine"}, "models": {"existingClaim": "shared"}},
    "hpa": {**KEYS, "autoscaling": {"kind": "hpa"}},
    "keda": {**ALL, "autoscaling": {"kind": "keda"}},
    "no budget": {**KEYS, "podDisruptionBudget": {"enabled": False}},
}
FOREIGN = {"ScaledObject", "ServiceMonitor"}
"""Kinds of operators: Kubernetes itself has no schema of them."""


def render(values):
    """The objects by kind."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="llm", namespace="models")
    texts = [text for name, text in files.items() if not name.endswith("NOTES.txt")]
    objects = [one for text in texts for one in yaml.safe_load_all(text) if one]
    assert len({one["kind"] for one in objects}) == len(objects)
    return {one["kind"]: one for one in objects}


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_every_object_is_valid(values, version):
    assert helm.lint(CHART, values, strict=True)["errors"] == []
    for kind, one in render(values).items():
        assert one["metadata"]["labels"]["app.kubernetes.io/instance"] == "llm"
        if kind not in FOREIGN:
            kubernetes_validate.validate(one, version, strict=True)


def test_a_wrong_object_is_noticed():
    deployment = render(KEYS)["Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, "1.37", strict=True)


def test_what_there_is():
    always = {"Deployment", "Service", "ConfigMap", "Secret", "PodDisruptionBudget"}
    expected = {
        "least": always,
        "all": always | {"PersistentVolumeClaim", "ServiceMonitor"},
        "own secret": always - {"Secret"},
        "hpa": always | {"HorizontalPodAutoscaler"},
        "keda": always | {"PersistentVolumeClaim", "ServiceMonitor", "ScaledObject"},
        "no budget": always - {"PodDisruptionBudget"},
    }
    assert {name: set(render(values)) for name, values in CASES.items()} == expected


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "auth.keys or auth.existingSecret"),
        ({**KEYS, "replica": 2}, "replica"),
        ({**KEYS, "autoscaling": {"kind": "vpa"}}, "kind"),
        ({**KEYS, "autoscaling": {"minReplicas": 0}}, "minReplicas"),
        ({"auth": {"keys": ["two\nlines"]}}, "keys"),
        ({**KEYS, "shutdownTimeout": 0}, "shutdownTimeout"),
    ],
)
def test_wrong_values_are_refused(values, says):
    with pytest.raises(helm.HelmError, match=says), helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        chart.render(values, name="llm")


def pod(values):
    return render(values)["Deployment"]["spec"]["template"]["spec"]


def serve_yaml(values):
    return yaml.safe_load(render(values)["ConfigMap"]["data"]["serve.yaml"])


@pytest.fixture
def read(tmp_path):
    """What octavo makes of the chart's configuration; the keys stand in a file of ours."""

    def read(values, **changes):
        (tmp_path / "keys").write_text("first\nsecond", encoding="utf-8")
        options = serve_yaml(values)
        assert options["api_key_file"].rpartition("/")[0] in {
            mount["mountPath"] for mount in pod(values)["containers"][0]["volumeMounts"]
        }
        file = tmp_path / "serve.yaml"
        file.write_text(yaml.safe_dump(options | {"api_key_file": str(tmp_path / "keys")} | changes))
        return file, configs(make_parser("serve").read(["--config", str(file)]))

    return read


def test_octavo_reads_the_configuration(read):
    _, (engine, server) = read(ALL)
    assert (engine.model, engine.tensor_parallel_size, engine.max_model_len) == ("smollm2", 2, 64)
    assert engine.shutdown_timeout == 60
    assert (server.host, server.port, len(server.api_key)) == ("0.0.0.0", 8000, 2)
    assert pod(ALL)["containers"][0]["image"] == "octavo:cuda"
    assert pod(KEYS)["containers"][0]["image"] == "octavo:cpu"
    assert pod(ALL)["containers"][0]["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 2}


async def test_probes_and_metrics_are_asked_for_without_a_key(read):
    _, (_, server) = read(KEYS)
    asked = {p["httpGet"]["path"] for n, p in pod(KEYS)["containers"][0].items() if n.endswith("Probe")}
    asked |= {render(ALL)["ServiceMonitor"]["spec"]["endpoints"][0]["path"]}
    assert asked == {"/health", "/ready", "/metrics"} and asked <= {route.path for route in load_routes()}

    async def through(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    transport = httpx.ASGITransport(build_stack(through, server, is_loopback=False).app)
    async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.1:8000") as client:
        assert {(await client.get(path)).status_code for path in asked} == {204}
        assert (await client.get("/v1/models")).status_code == 401


def test_autoscalers_ask_for_metrics_that_there_are():
    spec = render(CASES["keda"])["ScaledObject"]["spec"]
    [trigger] = spec["triggers"]
    [name] = re.findall(r"vllm:(\w+)", trigger["metadata"]["query"])
    assert name in METRICS and trigger["metadata"]["threshold"] == "5"
    assert spec["scaleTargetRef"]["name"] == render(KEYS)["Deployment"]["metadata"]["name"]
    assert 'service="llm-octavo"' in trigger["metadata"]["query"]
    hpa = render(CASES["hpa"])
    [metric] = hpa["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == f"vllm_{name}"
    assert "replicas" not in hpa["Deployment"]["spec"] and render(ALL)["Deployment"]["spec"]["replicas"] == 3


@pytest.mark.parametrize("values", [KEYS, {**KEYS, "shutdownTimeout": 3}])
def test_the_grace_period_outlasts_the_drain(values):
    spec = pod(values)
    [_, waits] = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    left = spec["terminationGracePeriodSeconds"] - int(waits) - serve_yaml(values)["shutdown_timeout"]
    assert left >= 10, "the end itself takes some seconds"


def test_a_pod_ends_within_its_grace_period(read):
    """A stream under way is finished, one that is too long ended; /ready says so at once, without a key."""
    values = {**KEYS, "shutdownTimeout": 2}
    file, _ = read(values, host="127.0.0.1")
    flags = ("--config", str(file))
    with ServeProcess(*flags, orders={"step_s": 0.05}, env={"OCTAVO_API_KEY": ""}) as server:
        body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        headers = {"Authorization": "Bearer second"}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            assert "data:" in next(lines)
            server.signal(signal.SIGTERM)
            server.wait_for_status(503, "/ready")
            assert server.get("/health").status_code == 200
            assert "error" in [line for line in lines if line][-1]
        spec = pod(values)
        assert server.end(spec["terminationGracePeriodSeconds"] - 5) == 0


def test_a_pod_may_do_little():
    container, spec = pod(KEYS)["containers"][0], pod(KEYS)
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"/models", "/var/cache/octavo/kernels", "/tmp", "/dev/shm"}
    dockerfile = (CHART.parents[1] / "docker/Dockerfile").read_text(encoding="utf-8")
    caches = re.findall(r"\b(?:TRITON_CACHE_DIR|HF_HOME)=(\S+)", dockerfile)
    assert len(caches) == 2 and all(cache.startswith(tuple(writable)) for cache in caches)
    assert f"--uid {spec['securityContext']['runAsUser']} " in dockerfile
