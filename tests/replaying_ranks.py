"""Ranks that say how many steps they replayed. On CPUs a stand-in computes again what a GPU would replay."""

import torch

from octavo.engine.executor.multiprocess import MultiprocessExecutor
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.platforms.cuda import CUDAPlatform
from octavo.runtime.worker.worker import Worker

_replays = [0]


def _counting(capture):
    def counted(work):
        replay = capture(work)

        def run():
            _replays[0] += 1
            replay()

        return run

    return counted


class ReplayingWorker(Worker):
    """Uses graphs, and says how often."""

    def __init__(self, *arguments):
        usual = CUDAPlatform.graph_capture
        CUDAPlatform.graph_capture = lambda platform: _counting(usual(platform))
        CPUPlatform.graph_capture = lambda platform: _counting(lambda work: work)
        super().__init__(*arguments)

    def describe(self):
        return super().describe() | {"replays": _replays[0]}


class ReplayingExecutor(MultiprocessExecutor):
    """`distributed_executor_backend="tests.replaying_ranks:ReplayingExecutor"`."""

    def __init__(self):
        super().__init__("tests.replaying_ranks:ReplayingWorker")


class LosingWorker(Worker):
    """Hands nothing but the residual stream on."""

    def __init__(self, *arguments):
        enter = Decoder._enter

        def lose(model, batch):
            stream, *others = enter(model, batch)
            return [stream, *map(torch.zeros_like, others)]

        Decoder._enter = lose
        super().__init__(*arguments)


class LosingExecutor(MultiprocessExecutor):
    """`distributed_executor_backend="tests.replaying_ranks:LosingExecutor"`."""

    def __init__(self):
        super().__init__("tests.replaying_ranks:LosingWorker")
