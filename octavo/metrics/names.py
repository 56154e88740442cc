"""Every metric: its name, kind, meaning, own labels and buckets. Names, labels and buckets are vLLM's.

docs/metrics.md is generated from this table. All metrics also have the labels `model_name` and `engine`. A
Prometheus page writes `_total` behind the names of counters.
"""

from typing import NamedTuple

from octavo.metrics.instruments import Counter, Gauge, Histogram, Metric

PREFIX = "vllm:"

_FIRST_TOKEN_S: tuple[float, ...] = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S: tuple[float, ...] = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S: tuple[float, ...] = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_SEQUENCES = (1, 2, 5, 10, 20)


class Description(NamedTuple):
    """One row of the table."""

    kind: type[Metric]
    explain: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS: dict[str, Description] = {
    "num_requests_running": Description(Gauge, "Sequences that take part in steps."),
    "num_requests_waiting": Description(Gauge, "Sequences that wait to start or to resume."),
    "kv_cache_usage_perc": Description(Gauge, "Share of the KV cache's blocks in use, 0 … 1."),
    "engine_sleep_state": Description(Gauge, "1 for the state that holds.", ("sleep_state",)),
    "cache_config_info": Description(Gauge, "Always 1; the labels are the cache's options.", ("…",)),
    "prefix_cache_queries": Description(Counter, "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": Description(Counter, "Prompt tokens found in the prefix cache."),
    "num_preemptions": Description(Counter, "Times a running sequence lost its blocks to another."),
    "prompt_tokens": Description(Counter, "Tokens of prompts that are computed or were found in the cache."),
    "prompt_tokens_cached": Description(Counter, "Those of them that were found in the cache."),
    "prompt_tokens_by_source": Description(Counter, "Prompt tokens by where they came from.", ("source",)),
    "generation_tokens": Description(Counter, "Tokens generated."),
    "request_success": Description(Counter, "Requests that ended, by reason.", ("finished_reason",)),
    "admission_rejections": Description(Counter, "Requests refused because too many waited.", ("reason",)),
    "time_to_first_token_seconds": Description(
        Histogram, "From arrival to the first token.", buckets=_FIRST_TOKEN_S
    ),
    "inter_token_latency_seconds": Description(
        Histogram, "Between two outputs of a sequence.", buckets=_TOKEN_S
    ),
    "request_time_per_output_token_seconds": Description(
        Histogram, "Time per token after the first, by request.", buckets=_TOKEN_S
    ),
    "e2e_request_latency_seconds": Description(
        Histogram, "From arrival to the end of a request.", buckets=_REQUEST_S
    ),
    "request_queue_time_seconds": Description(
        Histogram, "From hand-over to the first step.", buckets=_REQUEST_S
    ),
    "request_prefill_time_seconds": Description(
        Histogram, "From the first step to the first token.", buckets=_REQUEST_S
    ),
    "request_decode_time_seconds": Description(
        Histogram, "From the first to the last token.", buckets=_REQUEST_S
    ),
    "request_inference_time_seconds": Description(
        Histogram, "From the first step to the last token.", buckets=_REQUEST_S
    ),
    "request_prompt_tokens": Description(Histogram, "Prompt tokens of a request.", buckets=_TOKENS),
    "request_prefill_kv_computed_tokens": Description(
        Histogram, "Prompt tokens of a request that were not in the cache.", buckets=_TOKENS
    ),
    "request_generation_tokens": Description(
        Histogram, "Tokens generated for a request, all its sequences.", buckets=_TOKENS
    ),
    "request_max_num_generation_tokens": Description(
        Histogram, "Tokens of a request's longest sequence.", buckets=_TOKENS
    ),
    "request_params_n": Description(Histogram, "`n` of a request.", buckets=_SEQUENCES),
    "request_params_max_tokens": Description(Histogram, "`max_tokens` of a request.", buckets=_TOKENS),
    "iteration_tokens_total": Description(
        Histogram, "Tokens of a step: generated, and of prompts it completed.", buckets=_STEP_TOKENS
    ),
}
