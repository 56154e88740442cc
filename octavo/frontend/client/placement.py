"""`Placement`: which of several places gets the next request: replicas of an engine, or servers of a router.

The score of a place is work in tokens: prompts that wait there, what it would have to compute of this prompt,
and what its running requests take of each step, more where its cache is nearly full or its steps take much
longer than others'. The least wins, equal ones in turn. Knows neither sockets nor clocks.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from octavo.base.lru import LRU

BLOCK = 64
"""Tokens of a prompt that are remembered together."""
_RUNNING_TOKENS = 32
"""What a running request counts, in tokens of prompts."""
_OWN_TOKENS = 1024
"""What the answer of the request itself counts, where steps take longer."""
_FULL, _FULL_FACTOR = 0.5, 6
"""Share of the cache from which running requests count more, and by how much."""


_SLOW, _FORGETTING = 1.5, 0.997
"""How much longer steps of a slow place take, whose work counts as many times; and how that is forgotten."""


@dataclass(slots=True)
class Load:
    """What a place has to do."""

    waiting_tokens: int = 0
    num_running: int = 0
    cache_usage: float = 0.0
    is_up: bool = True
    step_s: float = 0.0
    """Seconds of its steps lately; 0 = not known."""


class Placement:
    """The loads of all places, and who has computed which beginnings."""

    def __init__(self, count: int) -> None:
        self.loads = [Load() for _ in range(count)]
        self._seen: LRU[Hashable, int] = LRU(1 << 16)
        """By beginning, the places that have computed it, as bits."""
        self._turn = 0

    def choose(
        self, num_tokens: int, beginnings: Sequence[Hashable], barred: Collection[int] = ()
    ) -> int | None:
        """Return the place for a prompt of this length and these beginnings of whole blocks; or None.

        barred: places not to be chosen
        """
        cached = self._num_cached(beginnings)
        best, least = None, 0.0
        known_s = [load.step_s for load in self.loads if load.is_up and load.step_s]
        for offset in range(len(self.loads)):
            place = (self._turn + offset) % len(self.loads)
            load = self.loads[place]
            pressure = 1 + _FULL_FACTOR * max(0.0, load.cache_usage - _FULL)
            score: float = load.waiting_tokens + num_tokens - cached[place]
            score += _RUNNING_TOKENS * load.num_running * pressure
            if known_s and (slowness := load.step_s / min(known_s)) > _SLOW:
                score = (score + _OWN_TOKENS) * slowness - _OWN_TOKENS
            if load.is_up and place not in barred and (best is None or score < least):
                best, least = place, score
        if best is not None:
            self._turn = (best + 1) % len(self.loads)
            for place, load in enumerate(self.loads):
                if place != best and not (load.waiting_tokens or load.num_running):
                    load.step_s *= _FORGETTING  # it may have recovered: sooner or later it is asked again
        return best

    def remember(self, beginnings: Sequence[Hashable], place: int) -> None:
        """A place is about to compute these."""
        for key in beginnings:
            self._seen.put(key, (self._seen.get(key) or 0) | 1 << place, 1)

    def forget_beginnings(self) -> None:
        """A place has lost its cache, and nobody can say quickly what was there."""
        self._seen.clear()

    def _num_cached(self, beginnings: Sequence[Hashable]) -> list[int]:
        """Return how many of the first tokens each place has computed before, as far as is known."""
        cached, having = [0] * len(self.loads), (1 << len(self.loads)) - 1
        for count, key in enumerate(beginnings, 1):
            having &= self._seen.get(key) or 0
            if not having:
                break
            for place in range(len(cached)):
                if having >> place & 1:
                    cached[place] = count * BLOCK
        return cached
