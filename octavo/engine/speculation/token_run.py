"""`TokenRun`: a growing run of tokens, and the place in it whose last tokens stand at its end again."""

from collections.abc import Sequence
from struct import pack, unpack_from
from typing import NamedTuple

import numpy as np

Array = np.ndarray
END = -1
"""Stands behind each sequence of a run that holds several."""
_SIZE = 4


class Match(NamedTuple):
    """A place in `run` before which `length` tokens agree with the last ones of a sequence.

    place: index of the token that followed there
    """

    run: "TokenRun"
    place: int
    length: int


class TokenRun:
    """Tokens of one sequence, or of several with END behind each, as bytes: one call searches them."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._bytes = bytearray(np.array(token_ids, np.int32).tobytes())

    def __len__(self) -> int:
        return len(self._bytes) // _SIZE

    def __getitem__(self, place: int) -> int:
        token_id: int = unpack_from("i", self._bytes, _SIZE * place)[0]
        return token_id

    def some(self, first: int, count: int) -> list[int]:
        """Return up to `count` tokens from `first` on."""
        count = min(count, len(self) - first)
        return [*unpack_from(f"{count}i", self._bytes, _SIZE * first)]

    def last(self, count: int) -> list[int]:
        """Return up to `count` tokens from the end."""
        return self.some(max(0, len(self) - count), count)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self._bytes += pack(f"{len(token_ids)}i", *token_ids)

    def find(self, least: int, most: int) -> Match | None:
        """Return the latest of the longest matches with its own end; None if all are shorter than `least`.

        most: tokens that are compared
        """
        match, end = None, len(self) - 1
        for length in range(least, min(most, len(self) - 1) + 1):
            if (end := self._rfind(length, end)) < 0:
                break
            match = Match(self, end, length)
        return match

    def _rfind(self, length: int, end: int) -> int:
        """Return where the last `length` tokens ended before, at place `end` at most; -1 = nowhere."""
        wanted, until = self._bytes[-_SIZE * length :], _SIZE * end
        while (at := self._bytes.rfind(wanted, 0, until)) % _SIZE and at >= 0:
            until = at + len(wanted) - 1
        return -1 if at < 0 else at // _SIZE + length
