"""`Totals`: the metrics of several processes as one, by files in a folder that they share.

Each process publishes what it counted; each reads all. Files of processes that ended stay, so no total ever
falls, whoever is asked; and one's own figures are read from the file too, so that two processes asked in turn
never disagree. Gauges are not added: all processes are told the same by the engine.
"""

import os
from itertools import chain
from pathlib import Path

import msgspec

from octavo.metrics.instruments import Counter, Histogram, Metric
from octavo.metrics.names import METRICS

_Key = tuple[str, tuple[tuple[str, str], ...]]
_BY_CORE = {row.prefix + name for name, row in METRICS.items() if row.counted == "by core"}


class Published(msgspec.Struct, array_like=True):
    """What one process counted."""

    counters: list[Counter]
    histograms: list[Histogram]


class Totals:
    """The part of one process, and the sum. The folder must outlive all of them, and be theirs alone."""

    def __init__(self, folder: Path, pid: int | None = None) -> None:
        """pid: names this process's file."""
        self._folder = folder
        self._file = folder / f"metrics-{pid or os.getpid()}"

    def publish(self, snapshot: list[Metric]) -> None:
        """Replace what this process said before."""
        counters = [metric for metric in snapshot if isinstance(metric, Counter)]
        histograms = [metric for metric in snapshot if isinstance(metric, Histogram)]
        new = self._file.with_name("new-" + self._file.name)
        new.write_bytes(msgspec.msgpack.encode(Published(counters, histograms)))
        new.replace(self._file)

    def read(self, snapshot: list[Metric]) -> list[Metric]:
        """The gauges of `snapshot`, and what all processes counted."""
        parts = [
            msgspec.msgpack.decode(path.read_bytes(), type=Published)
            for path in sorted(self._folder.glob("metrics-*"))
        ]
        series: dict[_Key, Metric] = {
            _key(metric): metric for metric in snapshot if not isinstance(metric, Counter | Histogram)
        }
        for metric in chain.from_iterable((*part.counters, *part.histograms) for part in parts):
            found = series.setdefault(_key(metric), metric)
            if found is not metric:
                _add(found, metric)
        return list(series.values())


def _key(metric: Metric) -> _Key:
    return metric.name, tuple(metric.labels.items())


def _add(total: Metric, part: Metric) -> None:
    match total, part:
        case Counter(), Counter() if part.name in _BY_CORE:
            total.value = max(total.value, part.value)
        case Counter(), Counter():
            total.add(part.value)
        case Histogram(), Histogram():
            total.sum += part.sum
            total.counts = [mine + others for mine, others in zip(total.counts, part.counts, strict=True)]
