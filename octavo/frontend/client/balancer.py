"""`Balancer`: which replica gets the next request (`Placement`). Asked by `BalancedDoor`.

All counts are integers that belong to an open request and go with it: nothing drifts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.frontend.client.placement import BLOCK, Load, Placement
from octavo.messages.request import EngineOutput, EngineRequest, SchedulerStats

_STEPS = 32
"""Over which the time of a step is smoothed."""
_MOST_BLOCKS = 128
"""Beginnings of a prompt that are remembered."""


@dataclass(slots=True)
class _Open:
    """A request at its replica. num_waiting: what it counts in `Load.waiting_tokens`, 0 once it runs"""

    replica: int
    num_waiting: int
    is_held: bool
    is_over: bool = False


class Balancer:
    """Counts what is open at each replica, and remembers who has computed which beginnings."""

    def __init__(self, num_replicas: int, *, block_size: int = BLOCK, shares_prefixes: bool = True) -> None:
        """block_size: of the replicas' caches, in tokens"""
        self._placement = Placement(num_replicas)
        self.loads = self._placement.loads
        self._block_size, self._shares_prefixes = block_size, shares_prefixes
        self._open: dict[str, _Open] = {}
        self._last: dict[int, tuple[int, float]] = {}
        """By replica that has work: the number of its last step, and when that was read."""

    def resize(self, count: int) -> None:
        """Have so many replicas: new ones are up; those that go, the last, must have been lost."""
        self.loads.extend(Load() for _ in range(count - len(self.loads)))
        del self.loads[count:]

    def num_open(self, replica: int) -> int:
        """Return how many requests are open at a replica, those that are retained left out."""
        return sum(found.replica == replica and not found.is_over for found in self._open.values())

    def place(self, request: EngineRequest) -> int | None:
        """Choose the replica of a request and count it there; None if there is none to choose."""
        rank, leader = request.standing.data_parallel_rank, self._open.get(request.sharing.leader_id)
        tokens = request.prompt_token_ids
        beginnings = self._beginnings(tokens, request.sharing.cache_salt) if self._shares_prefixes else []
        if rank is not None and rank >= len(self.loads):
            rank = None  # it has gone since the request was accepted
        follows = leader is not None and rank is None  # also where others are not taken any more
        if leader is not None and rank is None:
            rank = leader.replica
        replica = self._placement.choose(len(tokens), beginnings) if rank is None else rank
        if replica is None or not (self.loads[replica].is_up or follows):
            return None
        num_waiting = self._placement.remember(len(tokens), beginnings, replica)
        self._open[request.request_id] = _Open(replica, num_waiting, request.sharing.hold)
        self.loads[replica].waiting_tokens += num_waiting
        return replica

    def note(
        self, replica: int, outputs: Sequence[EngineOutput], stats: SchedulerStats, now_s: float
    ) -> None:
        """Take over what a step of a replica brought. now_s: of any clock"""
        load = self.loads[replica]
        last, self._last[replica] = self._last.get(replica), (stats.num_steps, now_s)
        if last is not None and (count := stats.num_steps - last[0]) > 0:
            weight = 1 if not load.step_s else min(1.0, count / _STEPS)
            load.step_s += ((now_s - last[1]) / count - load.step_s) * weight
        load.cache_usage = stats.num_blocks_used / max(1, stats.num_blocks)
        load.cache_tokens = stats.num_blocks * self._block_size or load.cache_tokens
        for output in outputs:
            if (found := self._open.get(output.request_id)) is None:
                continue
            if found.num_waiting:
                load.waiting_tokens -= found.num_waiting
                load.num_running += 1
                found.num_waiting = 0
            if output.finish_reason is not None:
                self._end(output.request_id, found)

    def forget(self, request_id: str) -> int | None:
        """Let go of a request that is aborted, or was not taken; return where it was, None if unknown."""
        if (found := self._open.get(request_id)) is None:
            return None
        found.is_held = False
        self._end(request_id, found)
        return found.replica

    def lose(self, replica: int) -> list[str]:
        """Forget a replica that has ended, and its beginnings; return the requests that were open there."""
        lost = [name for name, found in self._open.items() if found.replica == replica]
        unfinished = [name for name in lost if not self._open[name].is_over]
        for name in lost:
            del self._open[name]
        self.loads[replica] = Load(is_up=False)
        self._last.pop(replica, None)
        self._placement.forget_beginnings(replica)
        return unfinished

    def _end(self, request_id: str, found: _Open) -> None:
        load = self.loads[found.replica]
        if not found.is_over:
            load.waiting_tokens -= found.num_waiting
            load.num_running -= not found.num_waiting
            if not (load.waiting_tokens or load.num_running):
                self._last.pop(found.replica, None)  # what comes next may be long after
            found.num_waiting, found.is_over = 0, True
        if not found.is_held:
            del self._open[request_id]

    def _beginnings(self, tokens: list[int], salt: str) -> list[int]:
        """Return a key for each beginning of whole blocks."""
        keys, key = [], hash(salt)
        for start in range(0, min(len(tokens), BLOCK * _MOST_BLOCKS) - BLOCK + 1, BLOCK):
            key = hash((key, *tokens[start : start + BLOCK]))
            keys.append(key)
        return keys
