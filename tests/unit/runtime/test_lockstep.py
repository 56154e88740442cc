"""Ranks of a replica begin a step together, whoever of them had said that there is no work."""

import numpy as np
import pytest
import torch

from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.distributed.exchange import TokenExchange
from octavo.runtime.distributed.group import ONE, Group
from octavo.runtime.worker.lockstep import Lockstep
from octavo.runtime.worker.prepare import Work


class Told(Group):
    """Hears what was scripted; what this rank says must be its part of that."""

    def gather_rows(self, x):
        rows = torch.tensor(SCRIPT.pop(0))
        assert rows[self.rank].tolist() == x[0].tolist()
        return rows


SCRIPT: list[list[list[int]]] = []


def work(num_tokens, num_singles):
    ones = np.ones(num_singles, np.int64)
    starts = np.array([*range(num_singles), num_tokens])
    return Work(ones, ones, ones, starts, ones, ones, num_singles=num_singles)


@pytest.mark.parametrize(
    ("rounds", "joined", "num_tokens", "is_captured"),
    [
        ([[[5, 0], [5, 0], [0, 0], [0, 0]]], [], 8, True),
        ([[[5, 0], [0, 0], [3, 0], [3, 0]], [[5, 0], [5, 0], [9, 0], [9, 0]]], [4], 16, True),
        ([[[5, 0], [0, 0], [0, 0], [3, 1]], [[5, 0], [5, 0], [700, 1], [700, 1]]], [], 700, False),
    ],
    ids=["alone", "not yet", "prompts"],
)
def test_a_step_begins_when_all_ranks_of_the_replica_have_it(rounds, joined, num_tokens, is_captured):
    found, exchange = [], TokenExchange(ONE, ONE)
    parallel = ParallelContext(Group(0, 2), steps=Told(0, 4), exchange=exchange)
    step = Lockstep(parallel, exchange, [1, 2, 4, 8, 16], lambda: None, None)
    step._join_layers = lambda: found.append(exchange.num_tokens)
    SCRIPT[:] = rounds
    step.begin(work(5, 5))
    assert (found, SCRIPT) == (joined, [])
    assert (exchange.num_tokens, exchange.is_captured) == (num_tokens, is_captured)
