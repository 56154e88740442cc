"""`Collection`: the instruments of one engine, made on first use from the table of names."""

from typing import TypeVar

from octavo.metrics.instruments import Counter, Gauge, Histogram, Metric
from octavo.metrics.names import METRICS

M = TypeVar("M", bound=Metric)


class Collection:
    """Time series by name and own labels; not thread-safe."""

    def __init__(self, **labels: str) -> None:
        """`labels`: those that all series share."""
        self._labels = labels
        self._series: dict[tuple[str, tuple[str, ...]], Metric] = {}

    def counter(self, name: str, **labels: str) -> Counter:
        """The counter of this name (of the table, without prefix) and these labels."""
        return self._find(Counter, name, labels)

    def gauge(self, name: str, **labels: str) -> Gauge:
        """The same for a gauge."""
        return self._find(Gauge, name, labels)

    def histogram(self, name: str, **labels: str) -> Histogram:
        """The same for a histogram."""
        return self._find(Histogram, name, labels)

    def snapshot(self) -> list[Metric]:
        """Copies of all series, those of one name together, in the order of the table."""
        order = {name: place for place, name in enumerate(METRICS)}
        keys = sorted(self._series, key=lambda key: (order[key[0]], key[1]))
        return [self._series[key].copy() for key in keys]

    def _find(self, kind: type[M], name: str, labels: dict[str, str]) -> M:
        key = name, tuple(labels.values())
        found = self._series.get(key)
        if found is None:
            row = METRICS[name]
            assert row.kind is kind, f"{name} is a {row.kind.__name__}"
            buckets = (row.buckets,) if kind is Histogram else ()
            found = self._series[key] = kind(row.prefix + name, self._labels | labels, *buckets)
        assert isinstance(found, kind)
        return found
