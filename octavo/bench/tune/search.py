"""The search: coordinate ascent from the defaults, then from random points, until the time is over.

Each pass tries every choice of one axis after the other around the best point so far, and keeps what is
better by more than noise; axes that helped are tried first in the next pass. When a pass changes nothing,
the search starts again from the best of a few random points: interactions that no single step shows are
found so. In the end the best points are measured again, in turn, and the best median wins: what seems best of
many measured once had luck. What was measured is kept in a file; a search that was interrupted walks the same
way through it at once and goes on.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError, OctavoError
from octavo.bench.tune.space import Axis, Options

NOISE = 0.01
"""Share by which a point must be better to replace the best."""
_STARTS = 4
"""Random points of which the best is followed."""
_FINALISTS, _NEAR, _ROUNDS = 3, 0.1, 2
"""Points that are measured again, how far behind the best they may be, and how often."""
_FINAL_SHARE = 0.25
"""Most of the time that is kept for that."""
_WORST = float("-inf")


@dataclass
class Trial:
    """A point that was measured."""

    options: Options
    score: float | None
    """Larger is better; None: it failed."""
    seconds: float
    figures: dict[str, float] = field(default_factory=dict)
    bound: str = ""
    """What held it back."""
    notes: list[str] = field(default_factory=list)
    error: str = ""
    again: list[float | None] = field(default_factory=list)
    """Scores of later measurements."""

    @property
    def rank(self) -> float:
        """The score, below all others if it failed."""
        return _WORST if self.score is None else self.score

    @property
    def median(self) -> float:
        """The median of all scores, where a failure is below all others."""
        later = (_WORST if score is None else score for score in self.again)
        return statistics.median([self.rank, *later])


Measure = Callable[[Options], Trial]


class State:
    """Trials by options, in a file that survives the search."""

    def __init__(self, path: Path | None, question: Mapping[str, Any]) -> None:
        """question: what is searched for. Raises ConfigError for a file about something else."""
        self._path, self._question = path, json.loads(json.dumps(question))
        self.trials: dict[str, Trial] = {}
        if path and path.exists():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                self.trials = {_key(trial["options"]): Trial(**trial) for trial in content["trials"]}
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"--state {path} is no state of the tuner: {error}") from error
            if content["question"] != self._question:
                raise ConfigError(
                    f"--state {path} is of another search (model, workload or objective differ): "
                    "give another file."
                )

    def add(self, trial: Trial) -> None:
        """Keep a trial, also on disk."""
        self.trials[_key(trial.options)] = trial
        if self._path:
            content = {"question": self._question, "trials": [asdict(t) for t in self.trials.values()]}
            whole = self._path.with_name(self._path.name + ".new")
            whole.write_text(json.dumps(content, indent=1), encoding="utf-8")
            whole.replace(self._path)


class Search:
    """One search; `run` may be called once."""

    def __init__(
        self,
        axes: Sequence[Axis],
        measure: Measure,
        *,
        budget_s: float,
        state: State | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[Trial, bool], None] = lambda trial, is_best: None,
    ) -> None:
        """say: called with each new trial, and whether it is the best so far"""
        self._axes, self._measure, self._say, self._clock = list(axes), measure, say, clock
        self._state = state or State(None, {})
        self._draw, self._budget_s, self._end = random.Random(seed), budget_s, clock() + budget_s
        self._seen: dict[str, Trial] = {}
        self.best: Trial | None = None

    @property
    def num_trials(self) -> int:
        """Points that were measured, now or earlier."""
        return len(self._seen)

    @property
    def default(self) -> Trial:
        """The trial of the defaults; there once `run` has ended."""
        return self._seen[_key({})]

    def run(self) -> Trial:
        """Search until the budget is spent or every point is known, and settle it; the best trial.

        Raises OctavoError when the defaults cannot be measured, or nothing can.
        """
        default = self._try([{}] * len(self._axes))
        if default is None or default.score is None:
            raise OctavoError(f"The defaults cannot be measured: {default.error if default else 'no time'}")
        start: list[Options] | None = [{} for _ in self._axes]
        while start is not None and self._climb(start):
            start = self._fresh_start()
        self.best = self._settled()
        return self.best

    def _settled(self) -> Trial:
        """Measure the best points again, in turn, while there is time for all of them; the best median."""
        ranked = sorted(self._seen.values(), key=lambda trial: -trial.rank)[:_FINALISTS]
        finalists = [trial for trial in ranked if trial.rank >= (1 - _NEAR) * ranked[0].rank]
        while len(finalists) > 1 and not self._has_time(len(finalists)):
            finalists.pop()
        for number in range(_ROUNDS if len(finalists) > 1 else 0):
            left = [trial for trial in finalists if len(trial.again) <= number]
            if not self._has_time(len(left)):
                break
            for trial in left:
                trial.again.append(self._measure(trial.options).score)
                self._state.add(trial)
                self._say(trial, trial.median == max(other.median for other in finalists))
        return max(ranked, key=lambda trial: trial.median)

    def _has_time(self, count: int, kept_s: float = 0.0) -> bool:
        """Whether so many fit into the rest of the budget, less what finalists take, kept_s at most of it."""
        if not self._seen:
            return True
        mean_s = statistics.mean(trial.seconds for trial in self._seen.values())
        return self._clock() + count * mean_s + min(_FINALISTS * _ROUNDS * mean_s, kept_s) <= self._end

    def _climb(self, start: list[Options]) -> bool:
        """Follow improvements from a point until there is none. False when the time is over."""
        point, here = start, self._try(start)
        order, helped = list(range(len(self._axes))), True
        while helped and here is not None:
            gains: dict[int, float] = {}
            for axis in order:
                for choice in self._axes[axis].choices:
                    if choice == point[axis]:
                        continue
                    other = [*point[:axis], choice, *point[axis + 1 :]]
                    trial = self._try(other)
                    if trial is None:
                        return False
                    if trial.rank > here.rank + NOISE * abs(here.rank if here.score else 0):
                        gains[axis] = gains.get(axis, 0) + 1
                        point, here = other, trial
            helped = bool(gains)
            order.sort(key=lambda axis: -gains.get(axis, 0))
        return here is not None

    def _try(self, point: Sequence[Options]) -> Trial | None:
        """The trial of a point, measured unless it is known; None when there is no time to measure."""
        options = {name: value for choice in point for name, value in choice.items()}
        key = _key(options)
        trial = self._seen.get(key) or self._state.trials.get(key)
        if trial is None:
            if not self._has_time(1, _FINAL_SHARE * self._budget_s):
                return None
            trial = self._measure(options)
            self._state.add(trial)
        if key not in self._seen:
            self._seen[key] = trial
            is_best = self.best is None or trial.rank > self.best.rank
            if is_best:
                self.best = trial
            self._say(trial, is_best)
        return trial

    def _fresh_start(self) -> list[Options] | None:
        """The best of a few random points that were not tried; None when there is none, or no time."""
        found: list[tuple[float, list[Options]]] = []
        while len(found) < _STARTS and (point := self._unknown_point()) and (trial := self._try(point)):
            found.append((trial.rank, point))
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def _unknown_point(self) -> list[Options] | None:
        """A random point that was not tried; None when there seems to be none."""
        for _ in range(1000):
            point = [self._draw.choice(axis.choices) for axis in self._axes]
            if _key({name: value for choice in point for name, value in choice.items()}) not in self._seen:
                return point
        return None


def _key(options: Mapping[str, Any]) -> str:
    return json.dumps(options, sort_keys=True)
