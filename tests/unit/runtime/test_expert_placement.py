"""Experts that move: ranks add up to all of them before and after, and the busiest rank has less to do."""

import random

import pytest
import torch

from octavo.runtime.layers.expert_placement import (
    NOTHING,
    ExpertPlacement,
    balancedness,
    moves,
    place_experts,
)

CPU = torch.device("cpu")


def placements(num_experts, size, num_redundant):
    return [ExpertPlacement(num_experts, rank, size, num_redundant, CPU) for rank in range(size)]


@pytest.mark.parametrize(
    ("count", "size", "spare"), [(8, 2, 0), (8, 2, 2), (16, 4, 4), (6, 2, 6), (64, 8, 16)]
)
def test_every_expert_is_somewhere_and_none_twice_on_a_rank(count, size, spare):
    chance, places = random.Random(count), placements(count, size, spare)[0].places
    for _ in range(20):
        load = [int(chance.paretovariate(0.8)) for _ in range(count)]
        after = place_experts(load, places)
        assert {e for experts in after for e in experts} - {NOTHING} == set(range(count))
        for experts in after:
            there = [e for e in experts if e != NOTHING]
            assert len(experts) == (count + spare) // size and len(set(there)) == len(there)
        places = after


def test_the_busiest_rank_has_less_to_do():
    chance = random.Random(1)
    before = placements(64, 8, 16)[0].places
    found = []
    for _ in range(20):
        load = [int(10 * chance.paretovariate(1.2)) for _ in range(64)]
        after = place_experts(load, before)
        found.append((balancedness(load, before), balancedness(load, after)))
    assert all(new > old for old, new in found)
    assert sum(new for _, new in found) / 20 > 0.9 > 0.7 > sum(old for old, _ in found) / 20


def compute(placed, matrices, x, ids):
    """The sum over all ranks of the products with the experts that each has."""
    total = torch.zeros_like(x)
    for placement, own in zip(placed, matrices, strict=True):
        places = placement.own_places(ids, x)
        for token, of_token in enumerate(places.tolist()):
            total[token] += sum(x[token] @ own[place] for place in of_token if place >= 0)
    return total


def shift(placed, matrices, load):
    """Move experts between ranks, all in this process."""
    before = placed[0].places
    after = place_experts(load, before)
    changes, old = moves(before, after), [own.clone() for own in matrices]
    for move in changes:
        matrices[move.target][move.target_place] = old[move.source][move.source_place]
    for placement in placed:
        placement.use(after)
    return changes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_add_up_to_all_experts_before_and_after(dtype):
    torch.manual_seed(0)
    weights = torch.randn(8, 16, 16).to(dtype).double()
    placed = placements(8, 2, 4)
    matrices = [
        torch.cat([weights[:4], weights.new_zeros(2, 16, 16)]),
        torch.cat([weights[4:], weights[:2] * 0]),
    ]
    chance = random.Random(3)
    for _ in range(6):
        x = torch.randn(40, 16).to(dtype)
        ids = torch.stack([torch.randperm(8)[:2] for _ in range(40)]).int()
        wanted = torch.stack([sum(x[t].double() @ weights[e] for e in ids[t].tolist()) for t in range(40)])
        found = [compute(placed, matrices, x.double(), ids) for _ in range(2)]
        torch.testing.assert_close(found[0], wanted)
        alone = torch.cat(
            [compute(placed, matrices, x[t : t + 1].double(), ids[t : t + 1]) for t in range(40)]
        )
        assert torch.equal(found[0], alone), "a token's copies do not depend on its company"
        owners = placed[0].owners(ids, x)
        for rank, placement in enumerate(placed):
            assert torch.equal(owners == rank, placement.own_places(ids, x) >= 0)
        assert shift(placed, matrices, [chance.randrange(1, 100) for _ in range(8)])
    kept = [own.clone() for own in matrices]
    changes = shift(placed, matrices, [1, 1, 1, 1, 1, 1, 500, 400])
    if changes:  # routed by the new places over the old matrices
        assert not torch.allclose(compute(placed, kept, x.double(), ids), wanted)


def test_ids_of_kernels_that_have_not_run_are_harmless():
    [placement, _] = placements(8, 2, 2)
    ids = torch.tensor([[1 << 30, -5]], dtype=torch.int32)
    assert placement.own_places(ids, torch.ones(1, 8)).shape == (1, 2)
    placement.count(ids)


def test_tokens_are_counted_where_they_are_routed_and_rows_that_pad_go_nowhere():
    [placement, _] = placements(8, 2, 2)
    placement.count(torch.tensor([[1, 7], [1, 0]], dtype=torch.int32))
    ids = torch.tensor([[0, -1]], dtype=torch.int32)
    assert placement.own_places(ids, torch.zeros(1, 8)).tolist() == [[0, -1]]
    assert placement.owners(ids, torch.zeros(1, 8)).tolist() == [[0, -1]]
    assert placement.load.tolist() == [1, 2, 0, 0, 0, 0, 0, 1]
