"""A result on paper: the table in the terminal, the JSON file."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.bench.figures import METRICS
from octavo.bench.serve import ServeBench

DETAILS = (
    *("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"),
    *("latencies", "queue_times"),
)
"""Fields with a value per request: in the file with `save_detailed` only."""
_WIDTH = 50
_LINES = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "max_concurrency": "Maximum request concurrency:",
    "request_rate": "Request rate configured (RPS):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "input_sequence_throughput": "Input throughput (inputs/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
}
_SECTIONS = {
    "Probe Requests": {
        "probe_completed": "Probe requests completed:",
        "probe_failed": "Probe requests failed:",
        "probe_median_e2el_ms": "Median probe E2EL (ms):",
        "probe_p99_e2el_ms": "P99 probe E2EL (ms):",
        "probe_max_e2el_ms": "Max probe E2EL (ms):",
    },
    "Speculative Decoding": {
        "spec_decode_acceptance_rate": "Acceptance rate (%):",
        "spec_decode_acceptance_length": "Acceptance length:",
        "spec_decode_num_drafts": "Drafts:",
        "spec_decode_draft_tokens": "Draft tokens:",
        "spec_decode_accepted_tokens": "Accepted tokens:",
    },
}


def table(result: Mapping[str, Any]) -> str:
    """Return the figures as `vllm bench serve` prints them."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [
        _line(label, result[name]) for name, label in _LINES.items() if result.get(name) not in (None, "inf")
    ]
    for name, (short, long) in METRICS.items():
        found = list(_of_metric(result, name, short))
        lines += [long.center(_WIDTH, "-"), *found] if found else []
    for title, labels in _SECTIONS.items():
        found = [_line(label, result[name]) for name, label in labels.items() if name in result]
        lines += [title.center(_WIDTH, "-"), *found] if found else []
    for place, rate in enumerate(result.get("spec_decode_per_position_acceptance_rates", ())):
        lines.append(_line(f"  Position {place} (%):", rate * 100))
    return "\n".join([*lines, "=" * _WIDTH])


def first_errors(result: Mapping[str, Any], most: int = 10) -> list[str]:
    """Return what the first requests that failed were told."""
    return [error for error in result["errors"] if error][:most]


def file_of(bench: ServeBench, result: Mapping[str, Any]) -> Path:
    """Return where the result is kept, by vLLM's rule of names."""
    load, report = bench.load, bench.report
    at_once = f"-concurrency{load.max_concurrency}" if load.max_concurrency else ""
    rate = f"-{load.request_rate}qps"
    if load.ramp_up_strategy:
        rate = f"-ramp-up-{load.ramp_up_strategy}-{load.ramp_up_start_rps:g}qps-{load.ramp_up_end_rps:g}qps"
    model = str(result["model_id"]).rpartition("/")[2]
    name = f"{report.label or load.backend}{rate}{at_once}-{model}-{result['date']}.json"
    return Path(report.result_dir) / (report.result_filename or name)


def save(bench: ServeBench, result: Mapping[str, Any]) -> Path:
    """Write the result; its file. Raises OSError."""
    path, report = file_of(bench, result), bench.report
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in result.items() if report.save_detailed or name not in DETAILS}
    appends = report.append_result and path.exists() and path.stat().st_size > 0
    with path.open("a" if report.append_result else "w", encoding="utf-8") as file:
        file.write(("\n" if appends else "") + json.dumps(kept))
    return path


def _of_metric(result: Mapping[str, Any], name: str, short: str) -> Iterator[str]:
    ending = f"_{name}_ms"
    for key, value in result.items():
        word = key.removesuffix(ending)
        if word not in (key, "std") and "_" not in word:
            yield _line(f"{word.capitalize()} {short} (ms):", value)


def _line(label: str, value: float | str) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}"
