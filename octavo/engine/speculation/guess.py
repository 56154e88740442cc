"""`Guess`: what is expected to follow in one request, and how often that came true.

Every token that comes is compared with what was expected, whether it was computed as a draft or not. So the
chance of a draft is known before one is computed, and learning costs no computation.
"""

import numpy as np

from octavo.engine.speculation.token_run import END, Array, Match, TokenRun

_MOST_LENGTH = 24
"""Longer matches are as good as this."""
_WEIGHT = 8.0
"""Of what is assumed before anything was seen, in tokens."""
_MEMORY = 0.99
_OWN_MEMORY = 0.95
_WELL_FOUNDED = 8
"""Tokens that agreed before an edit, behind which the text is expected to go on."""
_WINDOW = 24
"""Tokens that an edit leaves out or puts in, at most."""


class Chances:
    """How often the token that followed a match came again, by the length of the match; of all requests."""

    def __init__(self, assumed: float | None = None) -> None:
        """assumed: the chance at first, of any length; None = longer matches are better."""
        lengths = np.arange(_MOST_LENGTH + 1)
        self._tried = np.full(len(lengths), _WEIGHT)
        self._hit = _WEIGHT * (lengths / (lengths + 2) if assumed is None else np.full(len(lengths), assumed))
        self.of_length: Array = self._hit / self._tried

    def note(self, length: int, *, hit: bool) -> float:
        """Learn that a token behind a match of `length` came, or another; return the chance it was given."""
        length = min(length, _MOST_LENGTH)
        chance = float(self.of_length[length])
        self._tried[length] = self._tried[length] * _MEMORY + 1
        self._hit[length] = self._hit[length] * _MEMORY + hit
        self.of_length[length] = self._hit[length] / self._tried[length]
        return chance

    def ahead(self, length: int, count: int, factor: float) -> Array:
        """Return the chances that 1, 2, … `count` tokens behind a match come; factor: of each token."""
        lengths = np.minimum(np.arange(length, length + count), _MOST_LENGTH)
        return np.cumprod(self.of_length[lengths] * factor)


class Guess:
    """The tokens of one request, and the match whose continuation is expected."""

    def __init__(self, token_ids: list[int]) -> None:
        self.own = TokenRun(token_ids)
        self.match: Match | None = None
        self._left: Match | None = None
        self._num_left = 0
        self._expected = self._hits = _WEIGHT

    @property
    def factor(self) -> float:
        """Return how much more often than in other requests a guess is right here; at most 1."""
        return min(1.0, self._hits / self._expected)

    def observe(self, token_ids: list[int], chances: Chances) -> None:
        """Take note of the tokens that came, and keep the match as long as they follow it.

        Where a long one ends, as at an edit, the first token that stands a little further on resumes it.
        """
        for token_id in token_ids:
            if (match := self.match) is not None:
                is_hit = match.run[match.place] == token_id
                chance = chances.note(match.length, hit=is_hit)
                self._expected = self._expected * _OWN_MEMORY + chance
                self._hits = self._hits * _OWN_MEMORY + is_hit
                self.match = Match(match.run, match.place + 1, match.length + 1) if is_hit else None
                if not is_hit and match.length >= _WELL_FOUNDED:
                    self._left, self._num_left = match, _WINDOW
            if self.match is None and self._num_left:
                self.match = self._resume(token_id)
            self.own.extend((token_id,))
        if self.match is not None and not self.ahead(1):
            self.match = None

    def _resume(self, token_id: int) -> Match | None:
        """Return the place behind this token near that where the last long match ended."""
        assert self._left is not None
        run, place, _ = self._left
        self._num_left -= 1
        near = run.some(place, _WINDOW)
        return Match(run, place + near.index(token_id) + 1, 1) if token_id in near else None

    def ahead(self, count: int) -> list[int]:
        """Return up to `count` tokens that are expected; a text that repeats itself goes on doing so."""
        if self.match is None:
            return []
        run, place, _ = self.match
        following = run.some(place, count)
        if run is self.own and len(following) < count:
            following = (following * (count // len(following) + 1))[:count]
        return following[: following.index(END)] if END in following else following
