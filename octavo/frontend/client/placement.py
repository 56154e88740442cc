"""`Placement`: which of several places gets the next request: replicas of an engine, or servers of a router.

The score of a place is work in tokens: what waits there, what it would have to compute of this prompt, what
its cache would have to drop for that (who had it will compute it again), and what its running requests take
of each step, more where the cache is nearly full or its steps take much longer than others'. The least wins,
equal ones in turn. What another place has computed, or is about to, counts several times: computing it again
delays all that come after. Only of a beginning that alone is more than one place's part of all requests a
copy pays for itself. Beginnings are forgotten as caches do, the least recently used first. Else all places
would seem to have all of them after a while. Knows neither sockets nor clocks.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile

BLOCK = 64
"""Tokens of a prompt that are remembered together."""
_RUNNING_TOKENS = 32
"""What a running request counts, in tokens of prompts."""
_OWN_TOKENS = 1024
"""What the answer of the request itself counts, where steps take longer."""
_MOST_BLOCKS = 1 << 16
"""Beginnings that are remembered of a place whose cache is larger, or of unknown size."""
_FULL, _FULL_FACTOR = 0.5, 6
"""Share of the cache from which running requests count more, and by how much."""
_AGAIN = 3
"""How many times a token counts that another place has computed."""
_HOT, _USES = 1.25, 4
"""How much more than its part of the requests a place has by one hot beginning; uses that tell."""
_SLOW, _FORGETTING = 1.5, 0.997
"""How much longer steps of a slow place take, whose work counts as many times; and how that is forgotten."""


@dataclass(slots=True)
class Load:
    """What a place has to do."""

    waiting_tokens: int = 0
    """Of prompts, those to be computed; and what each will take when it runs."""
    num_running: int = 0
    cache_tokens: int = _MOST_BLOCKS * BLOCK
    """That its cache holds."""
    cache_usage: float = 0.0
    is_up: bool = True
    step_s: float = 0.0
    """Seconds of its steps lately; 0 = not known."""


@dataclass(slots=True)
class _Use:
    """When a place was last given a beginning, and after how many requests lately, all places' counted."""

    last: int
    gap: float


class Placement:
    """The loads of all places, and who has computed which beginnings."""

    def __init__(self, count: int) -> None:
        self.loads = [Load() for _ in range(count)]
        self._seen: dict[int, OrderedDict[Hashable, _Use]] = defaultdict(OrderedDict)
        """By place, beginnings that it has computed; the last used ones last."""
        self._turn = self._num_placed = 0

    def choose(
        self, num_tokens: int, beginnings: Sequence[Hashable], barred: Collection[int] = ()
    ) -> int | None:
        """Return the place for a prompt of this length and these beginnings of whole blocks; or None.

        barred: places not to be chosen
        """
        best, least = None, 0.0
        known_s = [load.step_s for load in self.loads if load.is_up and load.step_s]
        usable = [place for place, load in enumerate(self.loads) if load.is_up and place not in barred]
        usable.sort(key=lambda place: (place - self._turn) % len(self.loads))
        cached = [self._num_cached(place, beginnings) for place in usable]
        most_cached = self._most_cached(usable, cached, beginnings)
        for place, num_cached in zip(usable, cached, strict=True):
            load = self.loads[place]
            dropped = len(self._seen[place]) + len(beginnings) - num_cached - self._most(place)
            pressure = 1 + _FULL_FACTOR * max(0.0, load.cache_usage - _FULL)
            again = max(0, most_cached - num_cached) * (_AGAIN - 1)
            score: float = load.waiting_tokens + num_tokens + BLOCK * (max(0, dropped) - num_cached + again)
            score += _RUNNING_TOKENS * load.num_running * pressure
            if known_s and (slowness := load.step_s / min(known_s)) > _SLOW:
                score = (score + _OWN_TOKENS) * slowness - _OWN_TOKENS
            if best is None or score < least:
                best, least = place, score
        if best is not None:
            self._turn = (best + 1) % len(self.loads)
            for place, load in enumerate(self.loads):
                if place != best and not (load.waiting_tokens or load.num_running):
                    load.step_s *= _FORGETTING  # it may have recovered: sooner or later it is asked again
        return best

    def remember(self, num_tokens: int, beginnings: Sequence[Hashable], place: int) -> int:
        """A place is about to get this prompt; return what it counts while it waits there."""
        seen, num_cached = self._seen[place], self._num_cached(place, beginnings)
        self._num_placed += 1
        for key in reversed(beginnings):  # of one prompt the end is dropped first
            if (use := seen.get(key)) is None:
                seen[key] = _Use(self._num_placed, len(self.loads))
                continue
            seen.move_to_end(key)
            use.gap += (self._num_placed - use.last - use.gap) / _USES
            use.last = self._num_placed
        while len(seen) > self._most(place):
            seen.popitem(last=False)
        return max(0, num_tokens - num_cached * BLOCK) + _RUNNING_TOKENS

    def forget_beginnings(self, place: int) -> None:
        """A place has lost its cache."""
        self._seen[place].clear()

    def _most(self, place: int) -> int:
        return min(_MOST_BLOCKS, self.loads[place].cache_tokens // BLOCK)

    def _most_cached(
        self, usable: Sequence[int], cached: Sequence[int], beginnings: Sequence[Hashable]
    ) -> int:
        """Return how many first blocks one of these places has; 0 if another copy of them is due.

        cached: how many each of them has
        """
        count, place = max(zip(cached, usable, strict=True), default=(0, 0))
        is_hot = count and self._seen[place][beginnings[count - 1]].gap * _HOT < len(usable)
        return 0 if is_hot else count

    def _num_cached(self, place: int, beginnings: Sequence[Hashable]) -> int:
        """Return how many of the first blocks a place has computed before, as far as is known."""
        return sum(1 for _ in takewhile(self._seen[place].__contains__, beginnings))
