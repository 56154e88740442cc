"""`StatsLine`: what an operator reads in the log every ten seconds, and once at the end.

Driven by the engines; reads EngineMetrics.
"""

import time
from collections.abc import Callable

from octavo.base.log import get_logger
from octavo.config.observability import ObservabilityConfig
from octavo.frontend.observe.engine_metrics import EngineMetrics

logger = get_logger(__name__)


class StatsLine:
    """Throughput since the last line, and the state now. Silent with disable_log_stats."""

    def __init__(
        self, metrics: EngineMetrics, config: ObservabilityConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.interval_s = config.log_stats_interval_s
        self.is_wanted = not config.disable_log_stats and self.interval_s > 0
        self._metrics = metrics
        self._clock = clock
        self._started_s = self._last_s = clock()
        self._num_prompt = self._num_generated = 0.0
        self._was_idle = True

    def log_if_due(self) -> None:
        """Log when the interval has passed; of two idle intervals in a row only the first."""
        if self.is_wanted and self._clock() - self._last_s >= self.interval_s:
            self.log(unless_idle=True)

    def log(self, *, unless_idle: bool = False) -> None:
        """Log now, and begin a new interval."""
        metrics, now = self._metrics, self._clock()
        elapsed_s = max(now - self._last_s, 1e-9)
        num_prompt = metrics.total("prompt_tokens") - self._num_prompt
        num_generated = metrics.total("generation_tokens") - self._num_generated
        self._last_s = now
        self._num_prompt += num_prompt
        self._num_generated += num_generated
        was_idle = self._was_idle
        self._was_idle = not (num_prompt or num_generated or metrics.total("num_running"))
        if unless_idle and was_idle and self._was_idle:
            return
        drafts = metrics.total("num_drafts")
        accepted = metrics.total("num_accepted_tokens")
        length = f", tokens per draft: {1 + accepted / drafts:.2f}" if drafts else ""
        logger.info(
            "Prompts: %.1f tokens/s, generation: %.1f tokens/s, running: %d, waiting: %d, KV cache: %.1f%%, "
            "prefix cache hits: %.1f%%%s",
            num_prompt / elapsed_s,
            num_generated / elapsed_s,
            metrics.total("num_running"),
            metrics.total("num_waiting"),
            100 * metrics.mean_cache_usage,
            100 * metrics.total("prefix_hits") / max(1, metrics.total("prefix_queries")),
            length,
        )

    def log_end(self) -> None:
        """The totals of the engine's life, when it ends; once."""
        metrics = self._metrics
        is_wanted, self.is_wanted = self.is_wanted, False
        if is_wanted and metrics.total("request_latency", "count"):
            logger.info(
                "Ended after %.1f s: %d requests, prompts: %d tokens, generation: %d tokens, "
                "prefix cache hits: %.1f%%",
                self._clock() - self._started_s,
                metrics.total("request_latency", "count"),
                metrics.total("prompt_tokens"),
                metrics.total("generation_tokens"),
                100 * metrics.total("prefix_hits") / max(1, metrics.total("prefix_queries")),
            )
