"""RequestState: where positions are in the cache, against a look at the tables position by position."""

import numpy as np
import pytest
import torch

from octavo.messages.kv import CachePlan
from octavo.runtime.worker.request_state import RequestState
from tests.fakes import fake_groups


@pytest.mark.parametrize("heads", [(1,), (1, 1), (2, 1), (3, 1, 2)])
def test_slots_by_the_block_size_of_each_group(heads):
    plan = CachePlan(fake_groups(*[0] * len(heads), heads=heads), 99, 4)
    state = RequestState(3, 40, plan, torch.device("cpu"))
    state.host_tables[:] = np.random.default_rng(1).integers(1, 99, state.host_tables.shape)
    rows, positions = np.array([0, 2, 2, 1, 0]), np.array([0, 5, 40, 23, 12])
    found = state.cache_slots(rows, positions)
    assert plan.block_sizes == [4 * max(heads) // n for n in heads]
    for group, size in enumerate(plan.block_sizes):
        blocks = [state.host_tables[group, r, p // size] for r, p in zip(rows, positions, strict=True)]
        assert found[group].tolist() == [b * size + p % size for b, p in zip(blocks, positions, strict=True)]
    assert found.dtype == np.int64 and state.host_tables.shape[2] >= 41 / min(plan.block_sizes)
