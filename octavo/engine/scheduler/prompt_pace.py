"""`PromptPace`: how many prompt tokens a step may have while somebody watches another's tokens come.

Owned by the scheduler. A long prompt alone takes the largest steps there are. Beside streams its steps are
cut to a length in time. What a step costs is a line fitted to the latest ones: a fixed time (decoding,
weights, a read of the context) and a time per prompt token. So the model, the machine, its load and the
length of the context need not be known. Where the fixed time is long already, prompts may double it: else
they would hardly get on, and a step's weights would be read for a handful of tokens.
"""

STEP_S = 0.08
"""Longest step beside streams, as long as its fixed time is less than half of it."""
ADDED_S = 0.1
"""What prompts may add to a long fixed time at most: what was learnt of it may be wrong."""
FIRST_TOKENS = 2048
"""Until a prompt was measured; that of the first stream has been, if it has more than one token."""
LEAST_TOKENS = 16
_DECAY = 0.8
"""Of the weight of what was measured, with each step that has prompt tokens."""
_SPREAD = 1 / 8
"""Of the mean number of tokens: without such a standard deviation a slope cannot be told from noise."""
_LEAST_SLOPE = 0.4
"""Of the mean time per token: noise must not make tokens look free. From 0.5 on, parts would never grow."""


class PromptPace:
    """Learns from finished steps; knows numbers of tokens and times."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        """Sums over steps with prompt tokens: 1, n, t, n² and n·t."""
        self._token_s = 0.0
        """What one more prompt token costs."""
        self._plain_s = 0.0
        """What a step takes in which each request computes one token."""

    def note(self, num_tokens: int, took_s: float) -> None:
        """Enter a finished step; `num_tokens`: beyond the one of each request."""
        if not num_tokens:
            self._plain_s += (took_s - self._plain_s) / 8
            return
        self._weight = self._weight * _DECAY + 1
        self._tokens = self._tokens * _DECAY + num_tokens
        self._seconds = self._seconds * _DECAY + took_s
        self._squares = self._squares * _DECAY + num_tokens**2
        self._products = self._products * _DECAY + num_tokens * took_s
        variance = self._squares * self._weight - self._tokens**2
        if variance > (_SPREAD * self._tokens) ** 2:
            self._token_s = (self._products * self._weight - self._tokens * self._seconds) / variance
        else:  # A slope that is no longer seen may be wrong: forget it, until fewer tokens show it again.
            self._token_s += (self._seconds / self._tokens - self._token_s) / 8

    def num_tokens(self) -> int:
        """Return how many tokens of prompts the next step may have."""
        if self._seconds <= 0:
            return FIRST_TOKENS
        mean_s = self._seconds / self._tokens
        token_s = min(mean_s, max(_LEAST_SLOPE * mean_s, self._token_s))
        fixed_s = (mean_s - token_s) * self._tokens / self._weight
        step_s = max(STEP_S, 2 * self._plain_s, fixed_s + min(fixed_s, ADDED_S))
        return max(LEAST_TOKENS, int((step_s - fixed_s) / token_s))
