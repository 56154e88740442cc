"""Ranks on CPUs that replay steps as GPUs do: the stand-in computes again what a GPU would replay."""

from octavo.engine.executor.multiprocess import MultiprocessExecutor
from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.worker.worker import Worker

_replays = [0]


def _capture(work):
    def replay():
        _replays[0] += 1
        work()

    return replay


class ReplayingWorker(Worker):
    """Uses graphs, and says how often."""

    def __init__(self, *arguments):
        CPUPlatform.graph_capture = lambda platform: _capture
        super().__init__(*arguments)

    def describe(self):
        return super().describe() | {"replays": _replays[0]}


class ReplayingExecutor(MultiprocessExecutor):
    """`distributed_executor_backend="tests.replaying_ranks:ReplayingExecutor"`."""

    def __init__(self):
        super().__init__("tests.replaying_ranks:ReplayingWorker")
