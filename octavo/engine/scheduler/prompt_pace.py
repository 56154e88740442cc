"""`PromptPace`: how many prompt tokens a step may have while somebody watches another's tokens come.

Owned by the scheduler. A long prompt alone takes the largest steps there are. Beside streams its steps are
cut to a length in time: as many tokens as were computed in such a time lately, decoding included. So the
model, the machine, its load and the length of the context need not be known. Where a step without prompts is
long already, prompts may double it: else they would hardly get on.
"""

STEP_S = 0.08
"""Longest step beside streams, as long as those without prompts take less than half of it."""
FIRST_TOKENS = 2048
"""Until a prompt was measured; that of the first stream has been, if it has more than one token."""
LEAST_TOKENS = 16
_DECAY = 0.5
"""Of what was measured, with each step that has prompt tokens; tokens and seconds are weighted alike, so that
time that is booked on the wrong one of two steps in flight evens out."""


class PromptPace:
    """Learns from finished steps; knows numbers of tokens and times."""

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._seconds = 0.0
        self._plain_s = 0.0
        """What a step takes in which each request computes one token."""

    def note(self, num_tokens: int, took_s: float) -> None:
        """Enter a finished step; `num_tokens`: beyond the one of each request."""
        if num_tokens:
            self._num_tokens = self._num_tokens * _DECAY + num_tokens
            self._seconds = self._seconds * _DECAY + took_s
        else:
            self._plain_s += (took_s - self._plain_s) / 8

    def num_tokens(self) -> int:
        """Return how many tokens of prompts the next step may have."""
        if self._seconds <= 0:
            return FIRST_TOKENS
        step_s = max(STEP_S, 2 * self._plain_s)
        return max(LEAST_TOKENS, int(step_s * self._num_tokens / self._seconds))
