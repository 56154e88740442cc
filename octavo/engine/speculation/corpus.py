"""`Corpus`: earlier outputs of one tenant, where the continuation of a text is looked up.

Bounded: what comes in replaces the older half of what is there. Idea: suffix decoding (Arctic Inference),
whose tree counts all continuations; here the latest of the longest matches is taken, from an index of pairs.
"""

from collections.abc import Sequence
from itertools import pairwise

from octavo.engine.speculation.token_run import END, Match, TokenRun

MOST_TOKENS = 1 << 19
"""Of all tenants together: some 100 MB. One keeps half of them at most."""
_MOST_PLACES = 8
"""Places of a pair of tokens that are compared: the latest."""


class _Generation:
    """Some outputs one after the other, and where each pair of tokens stands in them."""

    def __init__(self) -> None:
        self.run = TokenRun()
        self.num_outputs = 0
        self._places: dict[tuple[int, int], list[int]] = {}

    def add(self, token_ids: Sequence[int]) -> None:
        start = len(self.run) + 2
        self.run.extend([*token_ids, END])
        self.num_outputs += 1
        for place, pair in enumerate(pairwise(token_ids), start):
            places = self._places.setdefault(pair, [])
            places.append(place)
            del places[:-_MOST_PLACES]

    def find(self, end: Sequence[int]) -> Match | None:
        """Return the latest of the longest matches with the tokens `end`, of two tokens at least."""
        run, best = self.run, None
        for place in reversed(self._places.get((end[-2], end[-1]), ())):
            length, limit = 2, min(len(end), place)
            while length < limit and run[place - length - 1] == end[-length - 1]:
                length += 1
            if run[place] != END and (best is None or length > best.length):
                best = Match(run, place, length)
        return best


class Corpus:
    """The outputs of one tenant, in two generations."""

    def __init__(self, most_outputs: int) -> None:
        self._most_outputs = most_outputs
        self._young, self._old = _Generation(), _Generation()

    def add(self, token_ids: Sequence[int]) -> None:
        """Keep an output."""
        self._young.add(token_ids)
        if len(self._young.run) > MOST_TOKENS // 4 or 2 * self._young.num_outputs > self._most_outputs:
            self._young, self._old = _Generation(), self._young

    @property
    def num_tokens(self) -> int:
        """Return what it keeps."""
        return len(self._young.run) + len(self._old.run)

    def find(self, end: Sequence[int]) -> Match | None:
        """Return the longest match with the last tokens of a sequence, of two at least; None for none."""
        if len(end) < 2:
            return None
        young, old = self._young.find(end), self._old.find(end)
        return old if young is None or (old is not None and old.length > young.length) else young
