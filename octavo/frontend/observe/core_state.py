"""`CoreState`: what the cores of an engine have said of themselves, for /health and the log."""

import asyncio
import time

from octavo.base.log import get_logger
from octavo.config.observability import ObservabilityConfig
from octavo.frontend.observe.engine_metrics import EngineMetrics
from octavo.frontend.observe.health import Health, HealthState
from octavo.frontend.observe.stats_line import StatsLine
from octavo.messages.request import SchedulerStats

logger = get_logger(__name__)


class CoreState:
    """The statistics of each replica's last step, and when the last step was."""

    def __init__(self, metrics: EngineMetrics, config: ObservabilityConfig) -> None:
        self.line = StatsLine(metrics, config)
        self._metrics = metrics
        self._stats: dict[int, SchedulerStats] = {}
        self._last_step_s = time.monotonic()

    @property
    def stats(self) -> SchedulerStats:
        """Return the state of the first core as of its last step."""
        return self._stats.get(0) or SchedulerStats()

    def note_start(self) -> None:
        """A core is ready."""
        self._last_step_s = time.monotonic()

    def note_step(self, stats: SchedulerStats, engine: int) -> None:
        """Take what a core says after a step, or as a sign of life."""
        known = self._stats.get(engine)
        if known is None or stats.num_steps != known.num_steps:
            self._last_step_s = time.monotonic()
        self._stats[engine] = stats

    def note_restart(self, engine: int = 0) -> None:
        """A core has taken the place of a dead one."""
        metrics = self._metrics.of(engine)
        metrics.note_restart()
        number = metrics.engine_restarts.value
        logger.warning("A new engine core is ready; it is restart number %d of engine %d.", number, engine)

    def drop(self, engine: int) -> None:
        """A replica has gone, for a while or for good."""
        self._stats.pop(engine, None)
        self._metrics.of(engine).note_step(SchedulerStats())

    def clear(self) -> None:
        """No core is there."""
        self._stats.clear()

    def health(self, state: HealthState, reason: str) -> Health:
        """Return the same for supervisors."""
        return Health(
            state=state,
            reason=reason,
            num_restarts=int(self._metrics.total("engine_restarts")),
            last_step_age_s=time.monotonic() - self._last_step_s,
            num_running=sum(stats.num_running for stats in self._stats.values()),
            num_waiting=sum(stats.num_waiting for stats in self._stats.values()),
        )

    async def log(self) -> None:
        """Task: the periodic line."""
        while self.line.is_wanted:
            await asyncio.sleep(self.line.interval_s)
            self.line.log_if_due()
