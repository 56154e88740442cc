"""Ranks that store learned keys and values where another rank keeps these tokens."""

from octavo.engine.executor.multiprocess import MultiprocessExecutor
from octavo.runtime.attention.shared_context import own_slots
from octavo.runtime.distributed.group import Group
from octavo.runtime.worker.worker import Worker


class DisplacedWorker(Worker):
    """Takes itself for the rank behind it when it stores a learned prompt."""

    def allocate(self, plan):
        super().allocate(plan)
        ranks = self._parallel.dcp
        other = Group((ranks.rank + 1) % ranks.size, ranks.size)
        self._soft_prompts._own_slots = lambda layer, *slots: own_slots(other, 1, *slots)


class DisplacedExecutor(MultiprocessExecutor):
    """`distributed_executor_backend="tests.displaced_ranks:DisplacedExecutor"`."""

    def __init__(self):
        super().__init__("tests.displaced_ranks:DisplacedWorker")
