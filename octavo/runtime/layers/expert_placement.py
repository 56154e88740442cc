"""`ExpertPlacement`: which rank has which experts of a layer, where they are moved by their load.

Every rank has its own experts at first, and room for copies of others. Used by `Experts`; moved by
`worker.expert_balancer`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_LEAST_GAIN = 0.01
"""By how much less the busiest rank must have to do for experts to change places."""
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

    load: [E] int64 on the device, tokens of each expert, of those that this rank has routed
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
        self._owners = self._own.clone()
        self._counts = torch.ones(num_experts, dtype=torch.int32, device=device)
        self.use(self.places)

    def use(self, places: Places) -> None:
        """Route by these places from here on; what is in them must be there."""
        self.places = places
        own, counts = torch.full(self._own.shape, NOTHING, dtype=torch.int32), [0] * len(self.load)
        owners = own.clone()
        for rank, experts in enumerate(places):
            for place, expert in enumerate(experts):
                if expert != NOTHING:
                    owners[expert, counts[expert]] = rank
                    if rank == self._rank:
                        own[expert, counts[expert]] = place
                    counts[expert] += 1
        self._own.copy_(own)
        self._owners.copy_(owners)
        self._counts.copy_(torch.tensor(counts, dtype=torch.int32))

    def count(self, ids: Tensor) -> None:
        """Count the tokens that chose these experts, [T, k]."""
        chosen = self._valid(ids).flatten()
        self.load.scatter_add_(0, chosen, torch.ones_like(chosen))

    def own_places(self, ids: Tensor, x: Tensor) -> Tensor:
        """Return where this rank has the experts of tokens, [T, k] int32, -1 = they are another rank's."""
        return self._look_up(self._own, ids, x)

    def owners(self, ids: Tensor, x: Tensor) -> Tensor:
        """Return the ranks that have the experts of tokens, [T, k] int32; -1 where there is none."""
        return self._look_up(self._owners, ids, x)

    def _look_up(self, table: Tensor, ids: Tensor, x: Tensor) -> Tensor:
        """Look up copies of experts. Which takes a token depends on its bits, not on its company."""
        chosen = self._valid(ids)
        bits = x[:, :8].contiguous().view(torch.int16).int().sum(1, dtype=torch.int32) & 0x7FFF
        copies = bits[:, None] % self._counts[chosen]
        return table[chosen, copies.long()].where(ids >= 0, NOTHING)

    def _valid(self, ids: Tensor) -> Tensor:
        return ids.long().clamp(0, len(self.load) - 1)  # before kernels are compiled, ids may be any


def place_experts(load: list[int], places: Places) -> Places:
    """Return places by which the busiest rank has little more to do than the others, and few experts move.

    The busiest experts get the copies, one by one (idea: DeepSeek's EPLB). Then the busiest rank changes an
    expert with another rank, as often as that helps. No rank has an expert twice.
    """
    size, width = len(places), len(places[0])
    counts = [1] * len(load)
    for _ in range(size * width - len(load)):
        open_to = [expert for expert, count in enumerate(counts) if count < size]
        if open_to:
            counts[max(open_to, key=lambda expert: (load[expert] / counts[expert], -expert))] += 1
    share = [number / count for number, count in zip(load, counts, strict=True)]
    kept = [list(experts) for experts in places]
    work = [sum(share[e] for e in experts if e != NOTHING) for experts in kept]
    _set_copies(kept, work, counts, share)
    for _ in range(size * width):
        if not _exchange(kept, work, share):
            break
    return kept


def _set_copies(places: Places, work: list[float], counts: list[int], share: list[float]) -> None:
    """Take surplus copies from the busiest ranks, and put missing ones where there is least to do."""
    missing = []
    for expert, count in enumerate(counts):
        there = sorted((r for r, experts in enumerate(places) if expert in experts), key=lambda r: work[r])
        for rank in there[count:]:
            places[rank][places[rank].index(expert)] = NOTHING
            work[rank] -= share[expert]
        missing += [expert] * (count - len(there))
    for expert in sorted(missing, key=lambda e: -share[e]):
        free = [r for r, experts in enumerate(places) if NOTHING in experts and expert not in experts]
        if free:
            rank = min(free, key=lambda r: work[r])
            places[rank][places[rank].index(NOTHING)] = expert
            work[rank] += share[expert]


def _exchange(places: Places, work: list[float], share: list[float]) -> bool:
    """Let the busiest rank change an expert for a less busy one of another; False if that does not help."""
    busiest = max(range(len(places)), key=lambda r: work[r])
    best, most = None, work[busiest] * (1 - _LEAST_GAIN)
    for other, experts in enumerate(places):
        for here, mine in enumerate(places[busiest]):
            for there, theirs in enumerate(experts):
                if NOTHING in (mine, theirs) or mine in experts or theirs in places[busiest]:
                    continue
                gain = share[mine] - share[theirs]
                after = max(work[busiest] - gain, work[other] + gain)
                if gain > 0 and after < most:
                    best, most = (other, here, there, gain), after
    if best is None:
        return False
    other, here, there, gain = best
    mine, theirs = places[busiest][here], places[other][there]
    places[busiest][here], places[other][there] = theirs, mine
    work[busiest] -= gain
    work[other] += gain
    return True


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
