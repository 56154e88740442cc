"""`ExpertPlacement`: which rank has which experts of a layer, where they are moved by their load.

Every rank has its own experts at first, and room for copies of others. Used by `Experts`; moved by
`worker.expert_balancer`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NOTHING = -1
"""In a place without an expert."""
Places = list[list[int]]
"""By rank, the expert in each of its places."""


class Move(NamedTuple):
    """An expert goes from a place of a rank to one of another."""

    expert: int
    source: int
    source_place: int
    target: int
    target_place: int


class ExpertPlacement:
    """Counts the tokens of each expert, and says where it is. All ranks know the same.

    load:   [E] int64 on the device, tokens of each expert
    """

    def __init__(
        self, num_experts: int, rank: int, size: int, num_redundant: int, device: torch.device
    ) -> None:
        self._rank, count, spare = rank, num_experts // size, num_redundant // size
        self.places: Places = [
            [*range(first, first + count), *[NOTHING] * spare] for first in range(0, num_experts, count)
        ]
        self.load = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._own = torch.full((num_experts, size), NOTHING, dtype=torch.int32, device=device)
        self._counts = torch.ones(num_experts, dtype=torch.int32, device=device)
        self.use(self.places)

    def use(self, places: Places) -> None:
        """Route by these places from here on; what is in them must be there."""
        self.places = places
        own, counts = torch.full(self._own.shape, NOTHING, dtype=torch.int32), [0] * len(self.load)
        for rank, experts in enumerate(places):
            for place, expert in enumerate(experts):
                if expert != NOTHING:
                    if rank == self._rank:
                        own[expert, counts[expert]] = place
                    counts[expert] += 1
        self._own.copy_(own)
        self._counts.copy_(torch.tensor(counts, dtype=torch.int32))

    def own_places(self, ids: Tensor, x: Tensor) -> Tensor:
        """Return where this rank has the experts of its tokens, [T, k] int32, -1 = they are another rank's.

        Which copy of an expert takes a token depends on the token's own bits: not on the others of a batch.
        """
        chosen = ids.long()
        self.load.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        bits = x[:, :8].contiguous().view(torch.int16).int().sum(1, dtype=torch.int32) & 0x7FFF
        copies = bits[:, None] % self._counts[chosen]
        return self._own[chosen, copies.long()]


def place_experts(load: list[int], places: Places) -> Places:
    """Return places by which the busiest rank has as little to do as a greedy search finds.

    The busiest experts get the copies, one by one; then the busiest copies go to the ranks with the least to
    do, none twice to one. Who stays on a rank keeps its place. Idea: DeepSeek's EPLB.
    """
    size, width = len(places), len(places[0])
    counts = [1] * len(load)
    for _ in range(size * width - len(load)):
        open_to = [expert for expert, count in enumerate(counts) if count < size]
        if not open_to:
            break
        counts[max(open_to, key=lambda expert: (load[expert] / counts[expert], -expert))] += 1
    copies = [(load[expert] / count, expert) for expert, count in enumerate(counts) for _ in range(count)]
    wanted: list[list[int]] = [[] for _ in places]
    work = [0.0] * size
    # Those with most copies first among equals: they fit on fewest ranks.
    for share, expert in sorted(copies, key=lambda copy: (-copy[0], -counts[copy[1]], copy[1])):
        open_ranks = [r for r in range(size) if len(wanted[r]) < width and expert not in wanted[r]]
        if open_ranks:
            rank = min(open_ranks, key=lambda r: (work[r], expert not in places[r], len(wanted[r]), r))
            wanted[rank].append(expert)
            work[rank] += share
    return _keep_places(wanted, places)


def _keep_places(wanted: Places, places: Places) -> Places:
    kept = []
    for experts, now in zip(wanted, places, strict=True):
        new = iter([expert for expert in experts if expert not in now])
        kept.append([expert if expert in experts else next(new, NOTHING) for expert in now])
    missing = set().union(*places) - {NOTHING} - set().union(*kept)
    assert not missing, f"experts {missing} would be nowhere"
    return kept


def moves(before: Places, after: Places) -> list[Move]:
    """Return what makes one placement of the other; all are read before any place is written."""
    sources = {e: (r, p) for r, experts in reversed(list(enumerate(before))) for p, e in enumerate(experts)}
    return [
        Move(expert, *sources[expert], rank, place)
        for rank, experts in enumerate(after)
        for place, expert in enumerate(experts)
        if expert not in (NOTHING, before[rank][place])
    ]


def balancedness(load: list[int], places: Places) -> float:
    """Return the mean work of ranks by that of the busiest: 1 is best."""
    counts = [sum(expert in experts for experts in places) for expert in range(len(load))]
    work = [sum(load[e] / counts[e] for e in experts if e != NOTHING) for experts in places]
    return sum(work) / len(work) / max(work) if any(work) else 1.0
