"""Spans of requests, as a collector in memory gets them; the library's own parser reads the headers."""

import sys

import pytest

from octavo.base.errors import ConfigError
from octavo.config.observability import ObservabilityConfig
from octavo.frontend.observe import otel
from octavo.frontend.observe.engine_metrics import EngineMetrics
from octavo.frontend.output_processor import OutputProcessor
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.messages.request import EngineOutput, EngineOutputs, FinishReason, SchedulerStats
from octavo.messages.sampling import SamplingParams
from tests.fakes import ByteTokenizer, fake_config, options

export = pytest.importorskip("opentelemetry.sdk.trace.export")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


@pytest.fixture
def collected():
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture
def processor(collected):
    tracer = otel.RequestTracer(collected, "the-model")
    yield OutputProcessor(ByteTokenizer(), EngineMetrics(), tracer=tracer)
    tracer.close()


def prepare(processor, params, request_id=None, **keywords):
    inputs = InputProcessor(fake_config(), ByteTokenizer())
    prepared = inputs.process("prompt", params, options(**keywords), request_id=request_id)
    processor.add(prepared)
    return prepared


def finish(processor, prepared, reason=FinishReason.LENGTH):
    output = EngineOutput(prepared.key, [97], scheduled_s=101.5, finish_reason=reason)
    processor.process(EngineOutputs([output], SchedulerStats()))
    processor.close()


def test_one_span_with_the_attributes_of_the_request(processor, collected, monkeypatch):
    clock = Clock(monkeypatch)
    wanted = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9)
    prepared = prepare(processor, wanted, request_id="mine", arrival_s=99.0)
    clock.now = 104.0
    first = EngineOutput(prepared.key, [97], scheduled_s=101.5)
    processor.process(EngineOutputs([first], SchedulerStats()))
    clock.now = 106.0
    finish(processor, prepared)
    [span] = collected.get_finished_spans()
    assert (span.name, span.kind.name, span.parent) == ("llm_request", "SERVER", None)
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(7.0)
    assert span.resource.attributes["service.name"] == "octavo"
    assert dict(span.attributes) == {
        "gen_ai.response.model": "the-model",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.request.id": "mine",
        "gen_ai.request.n": 1,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.prompt_tokens": 6,
        "gen_ai.usage.completion_tokens": 2,
        "gen_ai.latency.e2e": 7.0,
        "gen_ai.latency.time_in_queue": 1.5,
        "gen_ai.latency.time_to_first_token": 5.0,
        "gen_ai.latency.time_in_model_prefill": 2.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 4.5,
    }


def test_the_client_s_trace_goes_on(processor, collected):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1"}
    finish(processor, prepare(processor, SamplingParams(), trace_headers=headers))
    [span] = collected.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state["a"] == "1"


def test_a_trace_that_is_not_sampled_stays_so(processor, collected):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    finish(processor, prepare(processor, SamplingParams(), trace_headers=headers))
    assert collected.get_finished_spans() == ()


@pytest.mark.parametrize("header", ["", "garbage", "00-" + "0" * 32 + "-0-01", "ff" * 4000])
def test_a_bad_header_begins_a_new_trace(processor, collected, header):
    finish(processor, prepare(processor, SamplingParams(), trace_headers={"traceparent": header}))
    [span] = collected.get_finished_spans()
    assert span.parent is None


def test_failures_are_marked(processor, collected):
    finish(processor, prepare(processor, SamplingParams()), FinishReason.ERROR)
    [span] = collected.get_finished_spans()
    assert span.status.status_code.name == "ERROR"


def test_no_endpoint_no_tracer():
    assert otel.tracer_for(fake_config()) is None


def with_endpoint(endpoint):
    import dataclasses

    observability = ObservabilityConfig(otlp_traces_endpoint=endpoint)
    return dataclasses.replace(fake_config(), observability=observability)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:4317", "http://127.0.0.1:4318/v1/traces"])
def test_without_the_library_the_error_says_what_to_install(monkeypatch, endpoint):
    for name in ("grpc", "http"):
        monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{name}", None)
    with pytest.raises(ConfigError, match=r"pip install octavo\[otel\]"):
        otel.tracer_for(with_endpoint(endpoint))


@pytest.mark.parametrize(
    ("endpoint", "protocol", "module"),
    [
        ("http://127.0.0.1:4317", "grpc", "proto.grpc"),
        ("http://127.0.0.1:4318/v1/traces", "grpc", "proto.http"),
        ("http://127.0.0.1:4318", "http/protobuf", "proto.http"),
    ],
)
def test_the_exporter_speaks_the_protocol_asked_for(monkeypatch, endpoint, protocol, module):
    pytest.importorskip("opentelemetry.exporter.otlp." + module)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    exporter = otel._exporter(endpoint)
    assert module in type(exporter).__module__
    exporter.shutdown()


def test_a_collector_that_does_not_answer_holds_nothing_up(monkeypatch):
    """Requests end at once, and the engine's end waits two seconds at most."""
    import threading
    import time

    class Silent(export.SpanExporter):
        freed = threading.Event()

        def export(self, spans):
            self.freed.wait(30)
            return export.SpanExportResult.SUCCESS

    monkeypatch.setattr(otel, "_LAST_EXPORT_S", 0.2)
    processor = OutputProcessor(ByteTokenizer(), tracer=otel.RequestTracer(Silent(), "m"))
    before = time.perf_counter()
    finish(processor, prepare(processor, SamplingParams()))
    assert time.perf_counter() - before < 1.5
    Silent.freed.set()
