"""`Machine`: what the server and its processes take of the machine, as metrics.

Read when somebody looks at the metrics page, on a thread: it asks the system about each process.
"""

import time
from collections.abc import Iterator
from contextlib import suppress

import psutil

from octavo.metrics.collection import Collection
from octavo.metrics.instruments import Metric
from octavo.metrics.nvml import read_gpus

_SHORTEST_S = 0.5
"""Below, the use of the CPU is not measured anew."""


class Machine:
    """The process `pid` and all below it, and the GPUs. For one thread at a time."""

    def __init__(self, pid: int, **labels: str) -> None:
        self._pid = pid
        self._all = Collection(**labels)
        self._last_s = time.monotonic()
        self._last_cpu_s = sum(_cpu_s(process) for process in self._processes())

    def snapshot(self) -> list[Metric]:
        """What is the case now."""
        processes = list(self._processes())
        self._note_cpu(processes)
        self._all.gauge("memory_used_bytes").set(sum(_memory_bytes(process) for process in processes))
        with suppress(OSError):
            self._all.gauge("memory_total_bytes").set(psutil.virtual_memory().total)
        for index, gpu in enumerate(read_gpus()):
            self._all.gauge("gpu_utilization", gpu=str(index)).set(gpu.utilization)
            self._all.gauge("gpu_memory_used_bytes", gpu=str(index)).set(gpu.used_bytes)
            self._all.gauge("gpu_memory_total_bytes", gpu=str(index)).set(gpu.total_bytes)
        return self._all.snapshot()

    def _note_cpu(self, processes: list[psutil.Process]) -> None:
        now, elapsed_s = time.monotonic(), time.monotonic() - self._last_s
        if elapsed_s < _SHORTEST_S:
            return
        cpu_s = sum(_cpu_s(process) for process in processes)
        self._all.gauge("cpu_utilization").set(max(0.0, cpu_s - self._last_cpu_s) / elapsed_s)
        self._last_s, self._last_cpu_s = now, cpu_s

    def _processes(self) -> Iterator[psutil.Process]:
        with suppress(psutil.NoSuchProcess):  # also where /proc is hidden
            root = psutil.Process(self._pid)
            yield root
            yield from root.children(recursive=True)


def _cpu_s(process: psutil.Process) -> float:
    """CPU time of a process and of its children that have ended."""
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0


def _memory_bytes(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):
        return int(process.memory_info().rss)
    return 0
