"""`Corpus`: earlier outputs of one tenant, where the continuation of a text is looked up.

Bounded: what comes in replaces the older half of what is there. Idea: suffix decoding (Arctic Inference),
whose tree counts all continuations; here the latest of the longest matches is taken, from chains of places
with the same hash of two tokens, as compressors have them: few objects, which are freed in no time.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from octavo.engine.speculation.token_run import END, Match, TokenRun

MOST_TOKENS = 1 << 19
"""Of all tenants together: some 40 MB. One keeps half of them at most."""
_MOST_PLACES = 8
"""Places of a pair of tokens that are compared: the latest."""
_MOST_STEPS = 64
"""Places of a chain that are looked at."""
_MASK = (1 << 16) - 1
_FACTOR = 0x9E3779B1


class _Generation:
    """Some outputs one after the other, and where pairs of tokens stand in them: what is behind them."""

    def __init__(self) -> None:
        self.run = TokenRun()
        self.num_outputs = 0
        self._latest = array("i", bytes(4 * (_MASK + 1)))  # by hash; 0 = nowhere
        self._before = array("i")  # by place, that before it in its chain

    def add(self, token_ids: Sequence[int]) -> None:
        start, ids, latest = len(self.run) + 2, np.array(token_ids, np.int64), self._latest
        self.run.extend([*token_ids, END])
        self._before.extend([0, 0])
        for place, key in enumerate((ids[:-1] * _FACTOR + ids[1:] & _MASK).tolist(), start):
            self._before.append(latest[key])
            latest[key] = place

    def find(self, end: Sequence[int]) -> Match | None:
        """Return the latest of the longest matches with the tokens `end`, of two tokens at least."""
        run, best, place, num_left = self.run, None, 0, _MOST_PLACES
        for step in range(_MOST_STEPS):
            place = self._before[place] if step else self._latest[end[-2] * _FACTOR + end[-1] & _MASK]
            if not place or not num_left:
                break
            if (run[place - 2], run[place - 1]) != (end[-2], end[-1]):
                continue
            num_left -= 1
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

    def add(self, token_ids: Sequence[int], *, is_new: bool = True) -> None:
        """Keep an output, or a further part of it."""
        self._young.add(token_ids)
        self._young.num_outputs += is_new
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
