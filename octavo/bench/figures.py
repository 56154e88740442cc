"""From timings to the figures of a report, by the names and definitions of `vllm bench serve`.

TPOT is (latency - TTFT) / (tokens - 1) of a request; ITL are the times between chunks, of all requests
together; E2EL is the latency. Percentiles are interpolated linearly.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from octavo.base.errors import ConfigError
from octavo.bench.client import Timing

SLO_NAMES = ("ttft", "tpot", "itl", "e2el")
METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
"""Short and long name of each metric that has percentiles."""


def parse_goodput(pairs: Iterable[str]) -> dict[str, float]:
    """Return limits in milliseconds from "ttft:200" and the like. Raises ConfigError."""
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ConfigError(
                f"Invalid format found for service level objectives: {pair!r}. Specify service level "
                'objectives for goodput as "KEY:VALUE" pairs, where the key is a metric name, and the '
                "value is a number in milliseconds."
            ) from None
        if name not in SLO_NAMES:
            raise ConfigError(
                f"Invalid metric name found, {name}: {value}. The service level objective name should be "
                f"one of {list(SLO_NAMES)}."
            )
        if not limits[name] >= 0:
            raise ConfigError(
                f"Invalid value found, {name}: {value}. The service level objective value should be "
                "non-negative."
            )
    return limits


def tpot(timing: Timing) -> float:
    """Return the seconds per token behind the first; 0 for a request of one token."""
    return (timing.latency - timing.ttft) / (timing.output_tokens - 1) if timing.output_tokens > 1 else 0.0


def generation_figures(
    timings: Sequence[Timing], duration_s: float, goodput: Mapping[str, float]
) -> dict[str, Any]:
    """Return the counts, rates and per-request lists. `output_tokens` of each timing must be known."""
    good = [timing for timing in timings if timing.success]
    inputs, outputs = (sum(getattr(t, name) for t in good) for name in ("prompt_len", "output_tokens"))
    tokens_per_s, at_once = _by_second(good)
    within = sum(_is_within(timing, goodput) for timing in good)
    return _common(timings, duration_s) | {
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_goodput": within / duration_s if goodput else None,
        "output_throughput": outputs / duration_s,
        "total_token_throughput": (inputs + outputs) / duration_s,
        "output_lens": [timing.output_tokens if timing.success else 0 for timing in timings],
        "ttfts": [timing.ttft for timing in timings],
        "itls": [timing.itl for timing in timings],
        "start_times": [timing.start_time for timing in timings],
        "generated_texts": [timing.generated_text for timing in timings],
        "max_output_tokens_per_s": float(max(tokens_per_s, default=0.0)),
        "max_concurrent_requests": int(max(at_once, default=0)),
        "rtfx": 0.0,
    }


def pooling_figures(timings: Sequence[Timing], duration_s: float) -> dict[str, Any]:
    """Return the same for embeddings and reranking."""
    good = [timing for timing in timings if timing.success]
    tokens, inputs = sum(t.prompt_len for t in good), sum(t.num_inputs for t in good)
    return _common(timings, duration_s) | {
        "total_input_tokens": tokens,
        "total_input_sequences": inputs,
        "input_sequence_throughput": inputs / duration_s,
        "total_token_throughput": tokens / duration_s,
    }


def _common(timings: Sequence[Timing], duration_s: float) -> dict[str, Any]:
    num_good = sum(timing.success for timing in timings)
    return {
        "duration": duration_s,
        "completed": num_good,
        "failed": len(timings) - num_good,
        "request_throughput": num_good / duration_s,
        "input_lens": [timing.prompt_len for timing in timings],
        "latencies": [timing.latency for timing in timings],
        "queue_times": [timing.client_queue_time for timing in timings],
        "errors": [timing.error for timing in timings],
    }


def latencies(timings: Sequence[Timing]) -> dict[str, list[float]]:
    """Return the values in seconds of every metric in METRICS, of requests that succeeded."""
    good = [timing for timing in timings if timing.success]
    return {
        "ttft": [timing.ttft for timing in good],
        "tpot": [tpot(timing) for timing in good if timing.output_tokens > 1],
        "itl": [value for timing in good for value in timing.itl],
        "e2el": [timing.latency for timing in good],
        "client_queue_time": [timing.client_queue_time for timing in good],
        "e2el_including_client_queue": [timing.latency + timing.client_queue_time for timing in good],
    }


def summary(name: str, values: Sequence[float], percentiles: Iterable[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles of seconds, in milliseconds."""
    array = np.asarray(values or [0.0]) * 1000
    result = {
        f"mean_{name}_ms": float(array.mean()),
        f"median_{name}_ms": float(np.median(array)),
        f"std_{name}_ms": float(array.std()),
    }
    for share in percentiles:
        result[f"p{share:g}_{name}_ms"] = float(np.percentile(array, share))
    return result


def probe_figures(probes: Sequence[Timing]) -> dict[str, float]:
    """Return the fields about probe requests; {} without one that succeeded."""
    good = [probe.latency * 1000 for probe in probes if probe.success]
    if not good:
        return {}
    return {
        "probe_completed": len(good),
        "probe_failed": len(probes) - len(good),
        "probe_median_e2el_ms": float(np.median(good)),
        "probe_p99_e2el_ms": float(np.percentile(good, 99)),
        "probe_max_e2el_ms": max(good),
    }


def _is_within(timing: Timing, limits_ms: Mapping[str, float]) -> bool:
    seconds = {"ttft": timing.ttft, "tpot": tpot(timing), "e2el": timing.latency}
    if "itl" in limits_ms:
        seconds["itl"] = float(np.percentile(timing.itl or [0.0], 99))
    return all(seconds[name] * 1000 <= limit for name, limit in limits_ms.items())


def _by_second(timings: Sequence[Timing]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that came, and requests that were open, in each second of the run."""
    if not timings:
        return np.zeros(0), np.zeros(0)
    start = min(timing.start_time for timing in timings)
    end = max(timing.start_time + timing.latency for timing in timings)
    tokens, open_requests = np.zeros(int(end - start) + 2), np.zeros(int(end - start) + 2)
    for timing in timings:
        first = timing.start_time - start
        times = first + timing.ttft + np.cumsum([0.0, *timing.itl])
        np.add.at(tokens, times.astype(int), 1)
        open_requests[int(first) : int(first + timing.latency) + 1] += 1
    return tokens, open_requests
