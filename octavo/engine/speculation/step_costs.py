"""`StepCosts`: what steps of a number of rows take, learned from those that were computed."""

from collections import deque

import numpy as np

from octavo.engine.speculation.token_run import Array

_LAST = 4
_ROW = 0.25
"""Assumed cost of one more row, as a share of a row's part of the only step known."""
_OUTDATED = 1024


class StepCosts:
    """Seconds by rows. The first step of a size is not counted: something is prepared then."""

    def __init__(self) -> None:
        self._took: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}
        self._num_steps = 0

    def note(self, num_rows: int, took_s: float) -> None:
        """Learn from a step; sizes that did not come for long are forgotten, to be tried anew."""
        self._num_steps += 1
        if num_rows in self._last:
            self._took.setdefault(num_rows, deque(maxlen=_LAST)).append(took_s)
        self._last[num_rows] = self._num_steps
        if self._num_steps % _OUTDATED == 0:
            for old in [n for n, step in self._last.items() if self._num_steps - step > _OUTDATED]:
                del self._last[old]
                self._took.pop(old, None)

    def of(self, num_rows: int, most_more: int) -> Array | None:
        """Return the seconds of steps of `num_rows` and 1, 2, … `most_more` more rows; None if unknown."""
        if num_rows not in self._took:
            return None
        sizes = sorted(self._took)
        # Something else may have held a step up: more rows, which took less time, tell.
        costs = np.minimum.accumulate([min(self._took[size]) for size in reversed(sizes)])[::-1]
        last, first_cost = sizes[-1], float(costs[0])
        slope = _ROW * first_cost / sizes[0]
        if len(sizes) > 1:
            slope = float(costs[-1] - costs[0]) / (last - sizes[0])
        rows = np.arange(num_rows, num_rows + most_more + 1)
        seconds: Array = np.interp(rows, sizes, costs) + np.maximum(rows - last, 0) * slope
        return seconds

    def near(self, num_rows: int) -> float | None:
        """Return the seconds of a step of `num_rows`, by steps of any sizes; None if there were none."""
        if not self._took:
            return None
        sizes = sorted(self._took)
        return float(np.interp(num_rows, sizes, [min(self._took[size]) for size in sizes]))
