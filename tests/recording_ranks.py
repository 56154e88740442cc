"""Ranks on CPUs that say how many steps they replayed from recorded calls."""

from octavo.engine.executor.multiprocess import MultiprocessExecutor
from octavo.runtime.kernels.cpu.library import Library
from octavo.runtime.worker.worker import Worker


class RecordingWorker(Worker):
    """Counts replays."""

    def __init__(self, *arguments):
        replay, self._count = Library.replay, 0

        def counted(library, log):
            self._count += 1
            replay(library, log)

        Library.replay = counted
        super().__init__(*arguments)

    def describe(self):
        return super().describe() | {"replays": self._count}


class RecordingExecutor(MultiprocessExecutor):
    """`distributed_executor_backend="tests.recording_ranks:RecordingExecutor"`."""

    def __init__(self):
        super().__init__("tests.recording_ranks:RecordingWorker")
