"""The page as Prometheus' own parser reads it: names, labels and buckets that dashboards of vLLM ask for."""

import math

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from octavo.config.server import ServerConfig
from octavo.frontend.observe.engine_metrics import EngineMetrics
from octavo.frontend.outputs.request_output import RequestStateStats
from octavo.messages.request import SchedulerStats
from octavo.messages.sampling import SamplingParams
from octavo.serving import metrics_page
from octavo.serving.metrics_board import MetricsBoard
from tests.fakes import fake_config

GAUGES = """num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
engine_sleep_state lora_requests_info cache_config_info"""
COUNTERS = """prefix_cache_queries prefix_cache_hits external_prefix_cache_queries external_prefix_cache_hits
mm_cache_queries mm_cache_hits num_preemptions prompt_tokens generation_tokens prompt_tokens_cached
prompt_tokens_by_source prompt_tokens_cached_by_source request_success admission_rejections
spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens
spec_decode_num_accepted_tokens_per_pos tool_call_parser_invocations"""
TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 200000 500000"
LATENCY = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
BETWEEN = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
FIRST = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
HISTOGRAMS = {
    "time_to_first_token_seconds": FIRST,
    "inter_token_latency_seconds": BETWEEN,
    "request_time_per_output_token_seconds": BETWEEN,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_prefill_kv_computed_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_params_n": "1 2 5 10 20",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "request_num_preemptions": "0 1 2 5 10 20 50",
}


@pytest.fixture
def engine():
    metrics = EngineMetrics(fake_config())
    metrics.note_step(SchedulerStats(num_running=2, num_waiting=1, num_blocks_used=3, num_blocks=4))
    metrics.note_first_token(0.03, 40, 16)
    metrics.note_tokens(5)
    metrics.note_gaps(0.02, 1)
    metrics.note_rejection("max_num_queued_reqs")
    stats = RequestStateStats(6, 6, 1.0, 1.0, 2.0, 3.0, 4.0)
    metrics.note_end(stats, SamplingParams(max_tokens=9), 40, "stop", 5.0)
    return metrics


@pytest.fixture
def read(engine):
    def read(metric_names="vllm", accept="text/plain"):
        app = Starlette(routes=[Route(r.path, r.handler) for r in metrics_page.ROUTES])
        app.state.config = ServerConfig(metric_names=metric_names)
        app.state.metrics_board = MetricsBoard(engine)
        answer = TestClient(app).get("/metrics", headers={"Accept": accept})
        assert answer.status_code == 200
        return answer

    return read


def families(answer, parse=parse_text):
    return {family.name: family for family in parse(answer.text)}


def test_every_name_label_and_bucket(read):
    found = families(read())
    for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", " ".join(HISTOGRAMS))):
        for name in names.split():
            assert found[f"vllm:{name}"].type == kind, name
    for name, bounds in HISTOGRAMS.items():
        samples = found[f"vllm:{name}"].samples
        limits = [float(s.labels["le"]) for s in samples if s.name.endswith("_bucket")]
        assert limits == [*map(float, bounds.split()), math.inf], name
        assert {s.labels["engine"] for s in samples} == {"0"}, name
    own = {
        "engine_sleep_state": "sleep_state",
        "num_requests_waiting_by_reason": "reason",
        "request_success": "finished_reason",
        "admission_rejections": "reason",
        "prompt_tokens_by_source": "source",
        "prompt_tokens_cached_by_source": "source",
    }
    for name, label in own.items():
        for sample in found[f"vllm:{name}"].samples:
            assert set(sample.labels) == {"model_name", "engine", label}, name


def test_values(read):
    samples = {
        (s.name, *sorted(s.labels.items() - {("engine", "0")})): s.value
        for family in families(read()).values()
        for s in family.samples
    }

    def value(name, **labels):
        [found] = [
            v for key, v in samples.items() if key[0] == name and labels.items() <= dict(key[1:]).items()
        ]
        return found

    assert value("vllm:num_requests_running") == 2
    assert value("vllm:num_requests_waiting_by_reason", reason="capacity") == 1
    assert value("vllm:num_requests_waiting_by_reason", reason="deferred") == 0
    assert value("vllm:kv_cache_usage_perc") == 0.75
    assert value("vllm:prompt_tokens_total") == 40
    assert value("vllm:prompt_tokens_cached_by_source_total", source="local_cache_hit") == 16
    assert value("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1
    assert value("vllm:time_to_first_token_seconds_bucket", le="0.02") == 0
    assert value("vllm:time_to_first_token_seconds_bucket", le="0.04") == 1
    assert value("vllm:time_to_first_token_seconds_sum") == pytest.approx(0.03)
    assert value("vllm:max_num_requests_running") == fake_config().scheduler.max_num_seqs
    assert value("vllm:memory_used_bytes") > 10**6
    assert value("vllm_requests_total", finished_reason="stop") == 1
    assert value("vllm_request_duration_seconds_count") == 1


def test_three_more_names_are_there_from_the_start(read):
    found = families(read())
    assert found["vllm_requests"].type == "counter"
    assert found["vllm_request_duration_seconds"].type == "histogram"
    assert found["vllm_gpu_utilization"].type == "gauge"


@pytest.mark.parametrize(
    ("choice", "there"), [("vllm", {"vllm"}), ("octavo", {"octavo"}), ("both", {"vllm", "octavo"})]
)
def test_the_prefix_is_chosen(read, choice, there):
    names = families(read(choice))
    assert {name.partition(":")[0] for name in names if ":" in name} == there
    assert "http_requests" in names


def test_openmetrics_for_those_who_ask(read):
    answer = read(accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert families(answer, parse_openmetrics)["vllm:prompt_tokens"].type == "counter"
