"""Counter, gauge, vector, histogram: live instruments, and the form of a snapshot. Public by `get_metrics`.

Written by one thread. Names and fields of what users read are those of vLLM's metrics reader, so that code
which looks at `metric.value` or `metric.buckets` keeps working.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(slots=True)
class Metric:
    """One time series: a name and its labels."""

    name: str
    labels: dict[str, str]

    def copy(self) -> Self:
        """Return the state now, as an object of its own."""
        values = (getattr(self, name) for name in self.__match_args__)
        copies: list[Any] = [v.copy() if isinstance(v, list | dict) else v for v in values]
        return type(self)(*copies)


@dataclass(slots=True)
class Counter(Metric):
    """A whole number that only grows."""

    value: int = 0

    def add(self, count: int = 1) -> None:
        """Count `count` more."""
        self.value += count


@dataclass(slots=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float = 0.0

    def set(self, value: float) -> None:
        """Note what is the case now."""
        self.value = value


@dataclass(slots=True)
class Vector(Metric):
    """Counters by position."""

    values: list[int] = field(default_factory=list)

    def add(self, position: int, count: int = 1) -> None:
        """Count `count` more at `position`."""
        self.values.extend([0] * (position + 1 - len(self.values)))
        self.values[position] += count


def in_vectors(metrics: Iterable[Metric]) -> list[Metric]:
    """Return them, with counters by position in one vector, where vLLM's metrics reader has them."""
    told: dict[Any, Metric] = {}
    for metric in metrics:
        labels = {key: value for key, value in metric.labels.items() if key != "position"}
        if isinstance(metric, Counter) and labels != metric.labels:
            vector: Any = told.setdefault((metric.name, *labels.values()), Vector(metric.name, labels))
            vector.add(int(metric.labels["position"]), metric.value)
        else:
            told[id(metric)] = metric
    return list(told.values())


@dataclass(slots=True)
class Histogram(Metric):
    """Observations by size."""

    bounds: tuple[float, ...]
    """Upper limits of the buckets, ascending, each inclusive; what lies above goes to "+Inf"."""
    sum: float = 0.0
    counts: list[int] = field(default_factory=list)
    """By bucket, not added up; the last is that of "+Inf"."""

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Enter `count` observations of this value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    @property
    def buckets(self) -> dict[str, int]:
        """Upper limit → observations up to it, those of smaller buckets included."""
        buckets, total = {}, 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets["+Inf" if bound == float("inf") else str(float(bound))] = total
        return buckets
