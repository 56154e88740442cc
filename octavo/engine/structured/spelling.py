"""`Spelling`: the tokens in which a model is expected to spell a text that its grammar determines.

Used by `guidance`. First as byte-pair encoding would, whose vocabularies list tokens in the order of merges;
then as outputs did spell the same text.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from octavo.base.lru import LRU

_MAX_LENGTH = 96
"""Bytes that are spelt at once: the work goes with its square."""
_MAX_KEPT = 1 << 20
"""Bytes of texts, with their tokens."""


class Spelling:
    """Texts of one vocabulary, and their tokens."""

    def __init__(self, tokens: Sequence[bytes], ids: dict[bytes, int]) -> None:
        """tokens: by id; ids: of those that may spell something."""
        self._tokens, self._ids = tokens, ids
        self._known: LRU[bytes, list[int]] = LRU(_MAX_KEPT)

    def tokens(self, text: bytes) -> list[int]:
        """Return the tokens of a text, or of its beginning."""
        if (known := self._known.get(text)) is None:
            known = self._merge(text[:_MAX_LENGTH])
            self._keep(text, known)
        return known

    def learn(self, text: bytes, token_ids: Sequence[int]) -> bool:
        """Keep how an output spelt a text, if these tokens of it go so far; return whether they do."""
        ends = [0, *accumulate(len(self._tokens[token_id]) for token_id in token_ids)]
        if ends[-1] < len(text):
            return False
        inside = [token_id for token_id, end in zip(token_ids, ends[1:], strict=True) if end <= len(text)]
        for place, begin in enumerate(ends[: len(inside)]):
            self._keep(text[begin:], inside[place:])
        return True

    def _keep(self, text: bytes, token_ids: list[int]) -> None:
        self._known.put(text, token_ids, len(text) + 8 * len(token_ids))

    def _merge(self, text: bytes) -> list[int]:
        """Merge the pair that is listed first, again and again."""
        parts = [text[place : place + 1] for place in range(len(text))]
        while len(parts) > 1:
            ranks = [self._ids.get(first + second, inf) for first, second in pairwise(parts)]
            if (best := min(ranks)) == inf:
                break
            place = ranks.index(best)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        spelt = [self._ids.get(part, -1) for part in parts]
        return spelt[: spelt.index(-1)] if -1 in spelt else spelt
