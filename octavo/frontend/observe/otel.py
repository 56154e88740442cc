"""`RequestTracer`: one OpenTelemetry span per request, `llm_request`, with the attributes that vLLM's has.

Fed by the output processor when a request has ended; everything that waits for a network happens on the
library's own thread, which drops spans rather than hold requests up. The library is the extra `otel`.
"""

import threading
import time
from typing import Any

from octavo.base import env
from octavo.base.errors import ConfigError
from octavo.config.engine import EngineConfig
from octavo.frontend.requests.open_request import OpenRequest

_LAST_EXPORT_S = 2.0
"""What the last spans get to leave when the engine ends."""
_NS_PER_S = 1_000_000_000


def tracer_for(config: EngineConfig) -> "RequestTracer | None":
    """A tracer if an endpoint is configured. Raises ConfigError when the library is missing."""
    endpoint = config.observability.otlp_traces_endpoint
    if not endpoint:
        return None
    return RequestTracer(_exporter(endpoint), config.served_names[0])


class RequestTracer:
    """Makes spans and hands them to an exporter."""

    def __init__(self, exporter: Any, model: str) -> None:
        """exporter: an OpenTelemetry SpanExporter; model: its name in the spans."""
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = Resource({"service.name": "octavo"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo")
        self._model = model

    def note_end(self, request: OpenRequest, reason: str, now: float) -> None:
        """A request has had its last output; now: of the monotonic clock."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode

        wall_ns = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            kind=SpanKind.SERVER,
            context=extract(request.trace_headers),
            start_time=wall_ns - int((now - request.stats.arrival_time) * _NS_PER_S),
            attributes=self._attributes(request, reason, now),
        )
        if reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end(wall_ns)

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_LAST_EXPORT_S)

    def _attributes(self, request: OpenRequest, reason: str, now: float) -> dict[str, Any]:
        params, stats = request.params, request.stats
        attributes = {
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": (reason,),
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": stats.num_generation_tokens,
            "gen_ai.latency.e2e": now - stats.arrival_time,
        }
        if stats.first_token_ts:
            attributes |= {
                "gen_ai.latency.time_in_queue": stats.queue_time,
                "gen_ai.latency.time_to_first_token": stats.first_token_latency,
                "gen_ai.latency.time_in_model_prefill": stats.prefill_time,
                "gen_ai.latency.time_in_model_decode": stats.decode_time,
                "gen_ai.latency.time_in_model_inference": stats.inference_time,
            }
        return {name: value for name, value in attributes.items() if value is not None}


def _exporter(endpoint: str) -> Any:
    """By HTTP where that is asked for or the endpoint's path is HTTP's; else by gRPC."""
    speaks_http = env.otlp_protocol() == "http/protobuf" or endpoint.rstrip("/").endswith("/v1/traces")
    try:
        if speaks_http:
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

            return over_http.OTLPSpanExporter(endpoint=endpoint)
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

        return over_grpc.OTLPSpanExporter(endpoint=endpoint)
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r} needs OpenTelemetry: pip install octavo[otel]."
        ) from error
