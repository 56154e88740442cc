"""What the engine says about itself."""

from dataclasses import dataclass

from octavo.config.option import option


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Logs and statistics."""

    disable_log_stats: bool = option(False, "No periodic line of throughput and cache use.")
    log_stats_interval_s: float = option(10.0, "Seconds between two such lines.")
