"""`RepetitionDetector`: notices that an output has begun to go round in circles.

One per request that asks for it; `stops` feeds it every output token. A pattern of p tokens stands at the end
c times over when the last (c - 1) p tokens each equal the one p places before. So it is enough to know, for
every p, how many such tokens the output ends with; and only distances to earlier places of the newest token
can have any. The work per token goes with their number, not with the longest pattern.
"""

from collections import deque

from octavo.messages.sampling import RepetitionDetectionParams


class RepetitionDetector:
    """State of one output."""

    __slots__ = ("_max_size", "_min_count", "_min_size", "_num_tokens", "_places", "_runs")

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._max_size = params.max_pattern_size
        self._min_size = max(1, params.min_pattern_size)
        self._min_count = params.min_count
        self._num_tokens = 0
        self._places: dict[int, deque[int]] = {}
        """By token id: where it stands in the last `max_size` tokens, and perhaps before."""
        self._runs: dict[int, int] = {}
        """By pattern size: how many tokens at the end equal the one so many places before."""

    def feed(self, token_id: int) -> bool:
        """Add the next token; True when the output now ends with a pattern repeated often enough."""
        here = self._num_tokens
        places = self._places.setdefault(token_id, deque())
        while places and here - places[0] > self._max_size:
            places.popleft()
        sizes = [here - place for place in places if here - place >= self._min_size]
        self._runs = {size: self._runs.get(size, 0) + 1 for size in sizes}
        places.append(here)
        self._num_tokens += 1
        return any(run >= size * (self._min_count - 1) for size, run in self._runs.items())
