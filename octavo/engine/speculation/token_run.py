"""`TokenRun`: a growing run of tokens, and the place in one whose last tokens are those of another."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Array = np.ndarray
END = -1
"""Stands behind each sequence of a run that holds several."""


class Match(NamedTuple):
    """A place in `run` before which `length` tokens agree with the last ones of a sequence.

    place: index of the token that followed there
    """

    run: "TokenRun"
    place: int
    length: int


class TokenRun:
    """Tokens of one sequence, or of several with END behind each."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._array: Array = np.array(token_ids or [END], np.int32)
        self.length = len(token_ids)

    @property
    def tokens(self) -> Array:
        """Return all tokens, [length] int32, as a view."""
        return self._array[: self.length]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        length = self.length + len(token_ids)
        if length > len(self._array):
            self._array = np.resize(self._array, 2 * length)
        self._array[self.length : length] = token_ids
        self.length = length

    def find(self, end: Array, least: int, most: int) -> Match | None:
        """Return the latest of the longest matches with the tokens `end`; None if it is shorter than `least`.

        most: tokens that are compared
        """
        tokens = self.tokens
        places = np.flatnonzero(tokens[:-1] == end[-1]) + 1
        length = 1
        while places.size and length < min(most, len(end)):
            longer = places[tokens[places - length - 1] == end[-length - 1]]
            longer = longer[longer > length]
            if not longer.size:
                break
            places, length = longer, length + 1
        return Match(self, int(places[-1]), length) if places.size and length >= least else None
