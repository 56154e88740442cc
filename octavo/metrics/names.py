"""Every metric: its name, kind, meaning, own labels and buckets. What vLLM has too is named and cut as there.

docs/metrics.md is generated from this table. All metrics but those of HTTP also have the labels `model_name`
and `engine`. A Prometheus page writes `_total` behind the names of counters.
"""

from typing import Literal, NamedTuple

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
_MODEL_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_SEQUENCES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50)
_HTTP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

Counted = Literal["by front", "by core"]
"""Where a total is made: each front process counts its own part, or all fronts are told the whole."""


class Description(NamedTuple):
    """One row of the table."""

    kind: type[Metric]
    explain: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    counted: Counted = "by front"
    prefix: str = PREFIX


def _gauge(explain: str, *labels: str) -> Description:
    return Description(Gauge, explain, labels)


def _counter(explain: str, *labels: str) -> Description:
    return Description(Counter, explain, labels)


def _core_counter(explain: str, *labels: str) -> Description:
    return Description(Counter, explain, labels, counted="by core")


def _sizes(explain: str, buckets: tuple[float, ...]) -> Description:
    return Description(Histogram, explain, buckets=buckets)


METRICS: dict[str, Description] = {
    "num_requests_running": _gauge("Sequences that take part in steps."),
    "num_requests_waiting": _gauge("Sequences that wait to start or to resume."),
    "num_requests_waiting_by_reason": _gauge(
        "The same by reason: capacity; deferred is always 0, as none is put aside.", "reason"
    ),
    "max_num_requests_running": _gauge("Option max_num_seqs."),
    "max_num_requests_waiting": _gauge("Sequences beyond these that are taken; +Inf = all."),
    "kv_cache_usage_perc": _gauge("Share of the KV cache's blocks in use, 0 … 1."),
    "num_blocks_pinned": _gauge("Blocks held for prefixes that are to stay (retention_s, pins)."),
    "engine_sleep_state": _gauge("1 for the state that holds.", "sleep_state"),
    "model_state": _gauge("1 for the state of one of several models that holds.", "state"),
    "model_loads": _counter("Times that one of several models was loaded or woken.", "kind"),
    "model_load_failures": _counter("Times that one of several models could not be loaded."),
    "engine_restarts": _core_counter("Cores started in the place of dead ones."),
    "lora_requests_info": _gauge(
        "Time of the last change; the labels are the adapters that requests of this process have.",
        "max_lora",
        "waiting_lora_adapters",
        "running_lora_adapters",
    ),
    "lora_loads": _core_counter("Adapters read from their folders."),
    "lora_hits": _core_counter("Look-ups that found an adapter in memory."),
    "lora_evictions": _core_counter("Adapters that left memory for others."),
    "cache_config_info": _gauge("Always 1; the labels are the cache's options.", "…"),
    "prefix_cache_queries": _core_counter("Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": _core_counter("Prompt tokens found in the prefix cache."),
    "external_prefix_cache_queries": _core_counter(
        "Prompt tokens looked up in what other engines keep (kv_transfer_config)."
    ),
    "external_prefix_cache_hits": _core_counter("Prompt tokens taken from there."),
    "mm_cache_queries": _counter("Images looked for among the prepared ones."),
    "mm_cache_hits": _counter("Found there."),
    "mm_preprocessing_seconds": _sizes(
        "Fetching, decoding and resizing of an image or a video.", _FIRST_TOKEN_S
    ),
    "mm_encoder_batches": _core_counter("Runs of the encoder of images, sounds and videos."),
    "mm_encoder_items": _core_counter("Items encoded in them: divided by runs, the mean batch."),
    "mm_prompt_tokens": _counter("Prompt tokens that stand for images and videos.", "modality"),
    "num_preemptions": _core_counter("Times a running sequence lost its blocks to another."),
    "num_blocks_swapped_out": _core_counter("Blocks whose content was copied to host memory."),
    "num_blocks_swapped_in": _core_counter("Blocks whose content was copied back."),
    "num_dropped_messages": _core_counter(
        "Messages to the core that it could not read, or whose request id was in use."
    ),
    "num_timeouts": _core_counter("Sequences ended by their time limit."),
    "deadline_misses": _counter(
        "Requests that ended after their deadline or were ended by their time limit."
    ),
    "prompt_tokens": _counter("Tokens of prompts that are computed or were found in the cache."),
    "prompt_tokens_cached": _counter("Those of them that were found in the cache."),
    "prompt_tokens_by_source": _counter("Prompt tokens by where they came from.", "source"),
    "prompt_tokens_cached_by_source": _counter("Those found, by cache.", "source"),
    "generation_tokens": _counter("Tokens generated."),
    "request_success": _counter("Requests that ended, by reason.", "finished_reason"),
    "admission_rejections": _counter("Requests refused because too many waited.", "reason"),
    "time_to_first_token_seconds": _sizes("From arrival to the first token.", _FIRST_TOKEN_S),
    "inter_token_latency_seconds": _sizes("Between two outputs of a sequence.", _TOKEN_S),
    "request_time_per_output_token_seconds": _sizes("Time per token after the first, by request.", _TOKEN_S),
    "e2e_request_latency_seconds": _sizes("From arrival to the end of a request.", _REQUEST_S),
    "model_wait_seconds": _sizes("Time that a request waited for one of several models.", _MODEL_S),
    "request_queue_time_seconds": _sizes("From hand-over to the first step.", _REQUEST_S),
    "request_prefill_time_seconds": _sizes("From the first step to the first token.", _REQUEST_S),
    "request_decode_time_seconds": _sizes("From the first to the last token.", _REQUEST_S),
    "request_inference_time_seconds": _sizes("From the first step to the last token.", _REQUEST_S),
    "request_prompt_tokens": _sizes("Prompt tokens of a request.", _TOKENS),
    "request_prefill_kv_computed_tokens": _sizes(
        "Prompt tokens of a request that were not in the cache.", _TOKENS
    ),
    "request_generation_tokens": _sizes("Tokens generated for a request, all its sequences.", _TOKENS),
    "request_max_num_generation_tokens": _sizes("Tokens of a request's longest sequence.", _TOKENS),
    "request_params_n": _sizes("`n` of a request.", _SEQUENCES),
    "request_params_max_tokens": _sizes("`max_tokens` of a request.", _TOKENS),
    "request_num_preemptions": _sizes("Times a request lost its blocks to another.", _PREEMPTIONS),
    "iteration_tokens_total": _sizes(
        "Tokens of a step: generated, and of prompts it completed.", _STEP_TOKENS
    ),
    "spec_decode_num_drafts": _core_counter("Times that tokens were guessed ahead for a sequence."),
    "spec_decode_num_draft_tokens": _core_counter("Tokens guessed ahead."),
    "spec_decode_num_accepted_tokens": _core_counter("Those of them that came true."),
    "spec_decode_num_accepted_tokens_per_pos": _core_counter("The same by place in the guess.", "position"),
    "tool_call_parser_invocations": _counter(
        "Answers searched for calls of tools.", "mode", "outcome", "request_type"
    ),
    "cpu_utilization": _gauge("CPU cores that the server and its processes keep busy."),
    "memory_used_bytes": _gauge("Resident memory of the server and its processes."),
    "memory_total_bytes": _gauge("Memory of the machine."),
    "gpu_utilization": _gauge("Share of time in which the GPU computed, 0 … 1.", "gpu"),
    "gpu_memory_used_bytes": _gauge("Memory of the GPU in use, by anybody.", "gpu"),
    "gpu_memory_total_bytes": _gauge("Memory of the GPU.", "gpu"),
    "http_requests": Description(
        Counter,
        "Requests answered, by path, method and class of status (2xx); none = no such path.",
        ("handler", "method", "status"),
        prefix="",
    ),
    "http_request_duration_seconds": Description(
        Histogram,
        "From the head of a request to the end of its answer.",
        ("handler", "method"),
        _HTTP_S,
        prefix="",
    ),
}

ALIASES = {
    "vllm_requests": "request_success",
    "vllm_request_duration_seconds": "e2e_request_latency_seconds",
    "vllm_gpu_utilization": "gpu_utilization",
}
"""Further names on a Prometheus page, for dashboards that look for them."""
