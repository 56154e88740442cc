"""`Balancer`: which replica gets the next request. Asked by `BalancedDoor`; knows neither sockets nor clocks.

The score of a replica is work in tokens: prompts that wait there, what it would have to compute of this
prompt, and what its running requests take of each step, more where its cache is nearly full. The least wins,
equal ones in turn. All counts are integers that belong to an open request and go with it: nothing drifts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.base.lru import LRU
from octavo.messages.request import EngineOutput, EngineRequest, SchedulerStats

_BLOCK, _MOST_BLOCKS = 64, 128
"""Tokens of a prompt that are remembered together; beginnings of prompts that are remembered."""
_RUNNING_TOKENS = 32
"""What a running request counts, in tokens of prompts."""
_FULL, _FULL_FACTOR = 0.5, 6
"""Share of the cache from which running requests count more, and by how much."""


@dataclass(slots=True)
class _Load:
    waiting_tokens: int = 0
    num_running: int = 0
    cache_usage: float = 0.0
    is_up: bool = True


@dataclass(slots=True)
class _Open:
    """A request at its replica. num_waiting: tokens of its prompt, 0 once it runs"""

    replica: int
    num_waiting: int
    is_held: bool
    is_over: bool = False


class Balancer:
    """Counts what is open at each replica, and remembers who has computed which beginnings."""

    def __init__(self, num_replicas: int, *, shares_prefixes: bool = True) -> None:
        self.loads = [_Load() for _ in range(num_replicas)]
        self._shares_prefixes = shares_prefixes
        self._open: dict[str, _Open] = {}
        self._seen: LRU[int, int] = LRU(1 << 16)
        """By beginning, the replicas that have computed it, as bits."""
        self._turn = 0

    def place(self, request: EngineRequest) -> int | None:
        """Choose the replica of a request and count it there; None if there is none to choose."""
        rank, leader = request.standing.data_parallel_rank, self._open.get(request.sharing.leader_id)
        tokens = request.prompt_token_ids
        beginnings = self._beginnings(tokens, request.sharing.cache_salt) if self._shares_prefixes else []
        if leader is not None and rank is None:
            rank = leader.replica
        replica = self._choose(len(tokens), beginnings) if rank is None else rank
        if replica is None or not self.loads[replica].is_up:
            return None
        for key in beginnings:
            self._seen.put(key, (self._seen.get(key) or 0) | 1 << replica, 1)
        self._open[request.request_id] = _Open(replica, len(tokens), request.sharing.hold)
        self.loads[replica].waiting_tokens += len(tokens)
        return replica

    def note(self, replica: int, outputs: Sequence[EngineOutput], stats: SchedulerStats) -> None:
        """Take over what a step of a replica brought."""
        load = self.loads[replica]
        load.cache_usage = stats.num_blocks_used / max(1, stats.num_blocks)
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
        """Forget a replica that has ended, and all beginnings; return the requests that were open there."""
        lost = [name for name, found in self._open.items() if found.replica == replica]
        unfinished = [name for name in lost if not self._open[name].is_over]
        for name in lost:
            del self._open[name]
        self.loads[replica] = _Load(is_up=False)
        self._seen.clear()
        return unfinished

    def _end(self, request_id: str, found: _Open) -> None:
        load = self.loads[found.replica]
        if not found.is_over:
            load.waiting_tokens -= found.num_waiting
            load.num_running -= not found.num_waiting
            found.num_waiting, found.is_over = 0, True
        if not found.is_held:
            del self._open[request_id]

    def _choose(self, num_tokens: int, beginnings: list[int]) -> int | None:
        cached = self._num_cached(beginnings)
        best, least = None, 0.0
        for offset in range(len(self.loads)):
            replica = (self._turn + offset) % len(self.loads)
            load = self.loads[replica]
            pressure = 1 + _FULL_FACTOR * max(0.0, load.cache_usage - _FULL)
            score: float = load.waiting_tokens + num_tokens - cached[replica]
            score += _RUNNING_TOKENS * load.num_running * pressure
            if load.is_up and (best is None or score < least):
                best, least = replica, score
        if best is not None:
            self._turn = (best + 1) % len(self.loads)
        return best

    def _num_cached(self, beginnings: list[int]) -> list[int]:
        """Return how many of the first tokens each replica has computed before, as far as is known."""
        cached, having = [0] * len(self.loads), (1 << len(self.loads)) - 1
        for count, key in enumerate(beginnings, 1):
            having &= self._seen.get(key) or 0
            if not having:
                break
            for replica in range(len(cached)):
                if having >> replica & 1:
                    cached[replica] = count * _BLOCK
        return cached

    def _beginnings(self, tokens: list[int], salt: str) -> list[int]:
        """Return a key for each beginning of whole blocks."""
        keys, key = [], hash(salt)
        for start in range(0, min(len(tokens), _BLOCK * _MOST_BLOCKS) - _BLOCK + 1, _BLOCK):
            key = hash((key, *tokens[start : start + _BLOCK]))
            keys.append(key)
        return keys
