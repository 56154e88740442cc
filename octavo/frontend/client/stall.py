"""`StallWatch`: tells a core that hangs from one that works long.

Used by the front that owns the core, which looks at regular times. The core says after each step, and twice
a second when it has nothing to do, how many steps it has made and whether one is due (EngineOutputs.stats),
from the very loop that makes the steps. There are three ways to be without steps and outputs for long:

- It goes on speaking, and a step is due, but none is made. It hangs.
- It is silent, and its processes use no CPU time: stopped, or waiting for what never comes. It hangs.
- It is silent and computes: one step of a long prompt may take minutes. Only after many times as long it
  hangs; most patience is due to a CPU, where a large model may need a second for some tokens. Ranks that wait
  for accelerators use a CPU, too: where one of them does not, it hangs, and the others wait for it.

Time is counted in looks of bounded length, so that a front that was itself stopped does not blame the core.
"""

import time
from collections.abc import Callable

from octavo.messages.request import SchedulerStats

_LOOKS = 8
"""Per stall timeout."""
_LONGEST_INTERVAL_S = 1.0
_PATIENCE, _PATIENCE_CPU = 10, 60
"""Stall timeouts granted to a core that computes, on an accelerator and without one."""
_BUSY = 0.02
"""Share of one CPU that a core uses at least when it computes, even on a crowded machine."""
_RECENT_S = 1.0
"""A core that speaks says something in this time. A last word from before a long step is older."""


class StallWatch:
    """Progress of one core."""

    def __init__(
        self,
        stall_timeout_s: float,
        cpu_seconds: Callable[[], list[float]],
        clock: Callable[[], float] = time.monotonic,
        *,
        on_cpu: bool = False,
    ) -> None:
        """cpu_seconds: CPU time that the core and its workers have used; of each that must use some, too.

        on_cpu: there is no accelerator
        """
        self._limit_s = stall_timeout_s * (_PATIENCE_CPU if on_cpu else _PATIENCE)
        self._timeout_s = stall_timeout_s
        self._cpu_seconds = cpu_seconds
        self._clock = clock
        self._num_steps = 0
        self._looked_s = clock()
        self._spoke_s: float | None = None
        """When in the window it spoke last."""
        self._cpu_s: list[float] | None = None
        """When the window was opened; asked for at its first look."""
        self._progress()

    @property
    def silence_s(self) -> float:
        """Time without progress, as of the last look."""
        return self._without_progress_s

    @property
    def interval_s(self) -> float:
        """Time between two looks."""
        return min(self._timeout_s / _LOOKS, _LONGEST_INTERVAL_S)

    def note(self, stats: SchedulerStats, *, has_outputs: bool = False) -> None:
        """The core has spoken."""
        self._spoke_s = self._window_s
        if has_outputs or stats.num_steps != self._num_steps or not stats.has_work:
            self._num_steps = stats.num_steps
            self._has_progressed = True

    def is_stalled(self) -> bool:
        """Look; to be asked every `interval_s`."""
        now = self._clock()
        elapsed_s, self._looked_s = min(now - self._looked_s, 2 * self.interval_s), now
        if self._has_progressed:
            self._progress()
            return False
        if self._cpu_s is None:  # not before: to ask is not cheap
            self._cpu_s = self._cpu_seconds()
        self._without_progress_s += elapsed_s
        self._window_s += elapsed_s
        if self._window_s < self._timeout_s:
            return False
        return not self._is_excused()

    def _progress(self) -> None:
        self._has_progressed = False
        self._without_progress_s = 0.0
        self._open_window()

    def _open_window(self) -> None:
        self._window_s = 0.0
        self._spoke_s = self._cpu_s = None

    def _is_excused(self) -> bool:
        """True for a core that computed all the time, and not yet for too long."""
        assert self._cpu_s is not None  # since the first look of this window
        used = zip(self._cpu_seconds(), self._cpu_s, strict=False)
        is_busy = all(now - before >= _BUSY * self._window_s for now, before in used)
        if self._speaks() or not is_busy or self._without_progress_s >= self._limit_s:
            return False
        self._open_window()
        return True

    def _speaks(self) -> bool:
        recent_s = max(self._window_s / 2, _RECENT_S)
        return self._spoke_s is not None and self._window_s - self._spoke_s <= recent_s
