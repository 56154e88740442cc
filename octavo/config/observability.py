"""What the engine says about itself."""

from dataclasses import dataclass

from octavo.config.option import Concern, option


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig(metaclass=Concern):
    """Logs, statistics and traces."""

    served_model_name: list[str] = option(
        [], "Names that requests may use; the first is the one in metrics. none = `model`."
    )
    disable_log_stats: bool = option(False, "No periodic line of throughput and cache use, none at the end.")
    log_stats_interval_s: float = option(10.0, "Seconds between two such lines.")
    enable_log_requests: bool = option(False, "Log each request that comes and its end, without its text.")
    otlp_traces_endpoint: str = option(
        "", "Send a span for each request there, by OpenTelemetry (http://host:4317); needs octavo[otel]."
    )
    record_trace: str = option(
        "",
        "Write a line per request to this file: its time, its lengths, hashes of its blocks, no text; for "
        "`octavo bench serve --dataset-name timed_trace` and `octavo tune`.",
    )
    profiler_dir: str = option("", "Folder for the traces of start_profile; empty = no profiling.")
