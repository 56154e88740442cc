"""What an engine counts of requests whose times and tokens are known."""

import logging

import pytest

from octavo.config.observability import ObservabilityConfig
from octavo.frontend.observe.engine_metrics import EngineMetrics
from octavo.frontend.observe.stats_line import StatsLine
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.outputs.request_output import RequestStateStats
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.messages.request import EngineOutput, EngineOutputs, FinishReason, SchedulerStats
from octavo.messages.sampling import SamplingParams
from octavo.metrics import Vector, in_vectors
from octavo.metrics.names import METRICS, PREFIX
from tests.fakes import ByteTokenizer, fake_config, options


def by_name(metrics, name, **labels):
    found = [
        metric
        for metric in metrics.snapshot()
        if metric.name == PREFIX + name and labels.items() <= metric.labels.items()
    ]
    [metric] = found
    return metric


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def test_a_request_from_arrival_to_end(monkeypatch):
    clock = Clock(monkeypatch)
    config = fake_config()
    metrics = EngineMetrics(config)
    processor = OutputProcessor(ByteTokenizer(), metrics)
    wanted = SamplingParams(max_tokens=9)
    prepared = InputProcessor(config, ByteTokenizer()).process("prompt", wanted, options(arrival_s=99.0))
    processor.add(prepared)

    def step(now, tokens, **fields):
        clock.now = now
        output = EngineOutput(prepared.key, list(tokens.encode()), scheduled_s=101.5, **fields)
        return processor.process(EngineOutputs([output], SchedulerStats(num_running=1, num_blocks=8)))

    step(104.0, "a", num_cached_tokens=4)
    step(104.5, "bc")
    [last] = step(106.0, "d", finish_reason=FinishReason.LENGTH).request_outputs

    stats = last.metrics
    assert (stats.arrival_time, stats.queued_ts, stats.scheduled_ts) == (99.0, 100.0, 101.5)
    assert (stats.queue_time, stats.prefill_time) == (1.5, 2.5)
    assert (stats.decode_time, stats.inference_time, stats.first_token_latency) == (2.0, 4.5, 5.0)
    sums = {
        "time_to_first_token_seconds": (1, 5.0),
        "inter_token_latency_seconds": (2, 2.0),
        "e2e_request_latency_seconds": (1, 7.0),
        "request_queue_time_seconds": (1, 1.5),
        "request_prefill_time_seconds": (1, 2.5),
        "request_decode_time_seconds": (1, 2.0),
        "request_inference_time_seconds": (1, 4.5),
        "request_time_per_output_token_seconds": (1, pytest.approx(2.0 / 3)),
        "request_prompt_tokens": (1, 6),
        "request_prefill_kv_computed_tokens": (1, 2),
        "request_generation_tokens": (1, 4),
        "request_max_num_generation_tokens": (1, 4),
        "request_params_n": (1, 1),
        "request_params_max_tokens": (1, 9),
        "iteration_tokens_total": (3, 6 + 1 + 2 + 1),
    }
    for name, expected in sums.items():
        histogram = by_name(metrics, name)
        assert (histogram.count, histogram.sum) == expected, name
    assert by_name(metrics, "prompt_tokens").value == 6
    assert by_name(metrics, "prompt_tokens_cached").value == 4
    assert by_name(metrics, "prompt_tokens_by_source", source="local_compute").value == 2
    assert by_name(metrics, "generation_tokens").value == 4
    assert by_name(metrics, "request_success", finished_reason="length").value == 1
    assert by_name(metrics, "num_requests_running").value == 1
    metrics.note_cache(8)
    cache = by_name(metrics, "cache_config_info").labels
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("4", "8")
    metrics.note_cache(6)  # of the next core
    assert by_name(metrics, "cache_config_info").labels == cache | {"num_gpu_blocks": "6"}


def test_two_sequences_are_one_request():
    metrics = EngineMetrics(fake_config())
    processor = OutputProcessor(ByteTokenizer(), metrics)
    wanted = SamplingParams(n=2, max_tokens=9, seed=1)
    prepared = InputProcessor(fake_config(), ByteTokenizer()).process("prompt", wanted)
    processor.add(prepared)
    first, second = (request.request_id for request in prepared.engine_requests)
    for outputs in (
        [EngineOutput(first, [97])],
        [EngineOutput(first, [97, 98]), EngineOutput(second, [97], finish_reason=FinishReason.STOP)],
        [EngineOutput(first, [99], finish_reason=FinishReason.LENGTH)],
    ):
        processor.process(EngineOutputs(outputs, SchedulerStats()))
    assert by_name(metrics, "prompt_tokens").value == 6
    assert by_name(metrics, "generation_tokens").value == 5
    assert by_name(metrics, "request_generation_tokens").sum == 5
    assert by_name(metrics, "request_max_num_generation_tokens").sum == 4
    assert by_name(metrics, "inter_token_latency_seconds").count == 2
    assert by_name(metrics, "request_success").value == 1


def test_the_engines_counters_are_taken_over():
    metrics = EngineMetrics()
    metrics.note_step(
        SchedulerStats(num_waiting=3, num_blocks_used=2, num_blocks=8, prefix_queries=5, prefix_hits=1)
    )
    metrics.note_step(
        SchedulerStats(num_waiting=1, num_blocks_used=4, num_blocks=8, prefix_queries=9, prefix_hits=4)
    )
    assert by_name(metrics, "num_requests_waiting").value == 1
    assert by_name(metrics, "kv_cache_usage_perc").value == 0.5
    assert by_name(metrics, "prefix_cache_queries").value == 9
    assert by_name(metrics, "prefix_cache_hits").value == 4


def test_sleep_and_rejections():
    metrics = EngineMetrics()
    metrics.note_sleep_state("discard_all")
    metrics.note_rejection("max_num_queued_reqs")
    states = {m.labels["sleep_state"]: m.value for m in metrics.snapshot() if "sleep_state" in m.labels}
    assert states == {"awake": 0.0, "weights_offloaded": 0.0, "discard_all": 1.0}
    assert by_name(metrics, "admission_rejections", reason="max_num_queued_reqs").value == 1


def test_every_metric_that_is_promised_is_made():
    metrics = EngineMetrics(fake_config())
    metrics.note_cache(8)
    metrics.note_first_token(0.1, 4, 0)
    metrics.note_media_tokens({"image": 2})
    metrics.note_tokens(1)
    metrics.note_rejection("max_num_queued_reqs")
    metrics.note_step(SchedulerStats(num_accepted_by_position=[1]))
    stats = RequestStateStats(2, 2, 1.0, 1.0, 2.0, 3.0, 4.0)
    metrics.note_end(stats, SamplingParams(), 4, "stop", 5.0)
    elsewhere = {"http_requests", "http_request_duration_seconds", "cpu_utilization"}
    elsewhere |= {name for name in METRICS if "memory" in name or "gpu" in name or name.startswith("model_")}
    metrics.note_tool_parsing("chat_completions", False, True)
    not_yet = {"lora_requests_info"}
    promised = set(METRICS) - elsewhere - not_yet
    assert {metric.name for metric in metrics.snapshot()} == {PREFIX + name for name in promised}


def test_a_new_core_counts_on_where_the_old_one_ended():
    metrics = EngineMetrics()
    metrics.note_step(SchedulerStats(num_timeouts=3, num_blocks_swapped_out=7, num_blocks_swapped_in=2))
    metrics.note_restart()
    metrics.note_step(SchedulerStats())
    assert by_name(metrics, "num_timeouts").value == 3
    metrics.note_step(SchedulerStats(num_timeouts=1, num_blocks_swapped_out=1))
    metrics.note_step(SchedulerStats(num_timeouts=5, num_blocks_swapped_out=1))
    assert by_name(metrics, "num_timeouts").value == 8
    assert by_name(metrics, "num_blocks_swapped_out").value == 8
    assert by_name(metrics, "num_blocks_swapped_in").value == 2
    assert by_name(metrics, "engine_restarts").value == 1


def test_accepted_drafts_are_counted_by_place_over_restarts():
    metrics = EngineMetrics()
    metrics.note_step(SchedulerStats(num_drafts=4, num_accepted_tokens=5, num_accepted_by_position=[3, 2]))
    metrics.note_restart()
    metrics.note_step(SchedulerStats(num_drafts=1, num_accepted_tokens=1, num_accepted_by_position=[1]))
    found = {m.labels["position"]: m.value for m in metrics.snapshot() if m.name.endswith("tokens_per_pos")}
    assert found == {"0": 4, "1": 2}
    [vector] = [m for m in in_vectors(metrics.snapshot()) if m.name.endswith("tokens_per_pos")]
    assert isinstance(vector, Vector) and vector.values == [4, 2] and "position" not in vector.labels
    assert by_name(metrics, "spec_decode_num_drafts").value == 5


@pytest.mark.parametrize(
    ("due_s", "reason", "is_missed"), [(4.0, "stop", 1), (6.0, "stop", 0), (6.0, "timeout", 1)]
)
def test_deadlines_that_were_missed(due_s, reason, is_missed):
    metrics = EngineMetrics()
    metrics.note_end(RequestStateStats(), SamplingParams(), 4, reason, 5.0, due_s)
    assert by_name(metrics, "deadline_misses").value == is_missed


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    caplog.set_level(logging.INFO, logger="octavo")
    return caplog


def test_the_line_tells_what_happened_since_the_last(lines):
    now = [0.0]
    metrics = EngineMetrics()
    line = StatsLine(metrics, ObservabilityConfig(log_stats_interval_s=10.0), lambda: now[0])
    metrics.note_first_token(0.1, 50, 0)
    metrics.note_tokens(20)
    metrics.note_step(SchedulerStats(1, 2, 1, 4, 0, 10, 5))
    now[0] = 9.0
    line.log_if_due()
    assert not lines.messages
    now[0] = 10.0
    line.log_if_due()
    assert lines.messages == [
        "Prompts: 5.0 tokens/s, generation: 2.0 tokens/s, running: 1, waiting: 2, KV cache: 25.0%, "
        "prefix cache hits: 50.0%"
    ]
    metrics.note_step(SchedulerStats())
    for now[0] in (20.0, 30.0, 40.0):
        line.log_if_due()
    assert len(lines.messages) == 2, "of idle intervals only the first is told"


def test_silence_when_not_wanted(lines):
    metrics = EngineMetrics()
    line = StatsLine(metrics, ObservabilityConfig(disable_log_stats=True), lambda: 1e9)
    metrics.note_end(RequestStateStats(), SamplingParams(), 1, "stop", 1.0)
    line.log_if_due()
    line.log_end()
    assert not lines.messages


def test_the_last_line_has_the_totals_and_comes_once(lines):
    metrics = EngineMetrics()
    line = StatsLine(metrics, ObservabilityConfig())
    metrics.note_first_token(0.1, 50, 0)
    metrics.note_tokens(20)
    metrics.note_end(RequestStateStats(), SamplingParams(), 50, "stop", 1.0)
    line.log_end()
    line.log_end()
    assert len(lines.messages) == 1
    assert "1 requests, prompts: 50 tokens, generation: 20 tokens" in lines.messages[0]
