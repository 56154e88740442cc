"""Tokens reach the experts of other ranks, whatever they chose, and come back as the sums of one device."""

import pytest
import torch

from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.kernels.experts import Routing
from tests.rank_processes import exit_codes

EXPERTS, TOP_K, SIZE = 8, 3, 6
COUNTS = {2: (5, 3), 4: (7, 0)}
"""Tokens of each replica, by ranks; those of one stand for two ranks that share layers."""


def choices(kind, count):
    """Experts of each token: drawn; all of the first rank; none at all; each token another one's."""
    drawn = torch.rand((count, EXPERTS), generator=torch.Generator().manual_seed(count)).topk(TOP_K).indices
    made = {
        "drawn": drawn,
        "first rank": torch.arange(TOP_K).expand(count, -1) % 2,
        "none": torch.full((count, TOP_K), -1),
        "alone": torch.where(torch.arange(TOP_K) == 1, torch.arange(count)[:, None] % EXPERTS, -1),
    }
    return made[kind].int()


def inputs(kind, replica, count):
    generator = torch.Generator().manual_seed(replica)
    x = torch.randn((count, SIZE), generator=generator)
    return x, Routing(choices(kind, count), torch.rand((count, TOP_K), generator=generator))


def compute(x, routing, own=range(EXPERTS)):
    """Each expert multiplies by a number of its own; in the order of the choice."""
    total = torch.zeros_like(x)
    for ids, weights in zip(routing.ids.T, routing.weights.T, strict=True):
        is_own = (ids >= own.start) & (ids < own.stop)
        total += torch.where(is_own, weights * (ids + 2), 0)[:, None] * x
    return total


def rank_main(rank, size, meeting, is_wrong):
    torch.set_num_threads(1)
    tp_size = size // 2
    replica, per_rank = rank // tp_size, EXPERTS // size
    parallel = ParallelContext.create(
        rank % tp_size, tp_size, f"file://{meeting}", torch.device("cpu"), has_ep=True, replica=(replica, 2)
    )
    exchange, owners = parallel.exchange, lambda ids, _: ids.div(per_rank, rounding_mode="floor")
    first = (rank + is_wrong) % size * per_rank
    own = range(first, first + per_rank)
    for kind in ("drawn", "first rank", "none", "alone"):
        x, routing = inputs(kind, replica, count := COUNTS[size][replica])
        exchange.num_tokens = max(COUNTS[size])
        found = []
        for exchange.is_captured, exchange.most_gathered in ((True, 0), (False, 99), (False, 0)):
            for _ in range(2):
                found.append(exchange.run(x, routing, owners, lambda *given: compute(*given, own)))
        assert found[0].shape == (count, SIZE)
        assert all(torch.equal(y, found[0]) for y in found), "one way differs from another"
        torch.testing.assert_close(found[0], compute(x, routing), atol=1e-5, rtol=1e-5)
    parallel.close()


@pytest.mark.parametrize("size", COUNTS)
def test_every_token_comes_back_whole(tmp_path, size):
    ranks = [(rank, size, tmp_path / "meeting", False) for rank in range(size)]
    assert exit_codes(rank_main, ranks) == [0] * size


def test_experts_of_another_rank_are_noticed(tmp_path):
    assert 0 not in exit_codes(rank_main, [(rank, 2, tmp_path / "meeting", True) for rank in range(2)])
