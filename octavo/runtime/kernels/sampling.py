"""The sampling family: choosing tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor


class Draws(NamedTuple):
    """How each row is drawn; both [n] float64.

    temperature: 0 = not at all: the largest logit, of equal ones the lowest id
    noise:       in [0, 1): the point of the distribution function that is drawn
    """

    temperature: Tensor
    noise: Tensor

    def at(self, rows: Tensor) -> "Draws":
        """Return how these rows are drawn."""
        return Draws(*(numbers[rows] for numbers in self))


class Limits(NamedTuple):
    """What shapes a row's distribution; all [n] float64, contiguous, or [n, 1] as `columns`."""

    temperature: Tensor
    """> 0"""
    top_k: Tensor
    """< 1 = off"""
    top_p: Tensor
    """≥ 1 = off"""
    min_p: Tensor
    """0 = off"""

    def at(self, rows: Tensor) -> "Limits":
        """Return the limits of these rows."""
        return Limits(*(numbers[rows] for numbers in self))

    @property
    def cuts(self) -> Tensor:
        """Return which rows lose tokens, [n] bool."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)

    def columns(self) -> "Limits":
        """Return the same as [n, 1]."""
        return Limits(*(numbers[:, None] for numbers in self))


class Choice(NamedTuple):
    """token_ids: [n] int64; max_logits: [n] float32, each row's largest: not finite = no valid choice."""

    token_ids: Tensor
    max_logits: Tensor


class Choose(Protocol):
    """One token per row."""

    def __call__(self, logits: Tensor, draws: Draws | None = None, limits: Limits | None = None) -> Choice:
        """Choose; the ids of rows without a valid choice may be none at all.

        logits: [n, vocab_size] of any floating-point type, contiguous rows; float32 may be overwritten
        draws:  None = the largest logit of every row
        limits: None = tokens are drawn from all logits; the temperature is that of rows > 0
        """


class DrawFromParts(Protocol):
    """What `Choose` draws from limited distributions, without all logits in one place."""

    def __call__(
        self, logits: Tensor, start: int, noise: Tensor, limits: Limits, gather: Callable[[Tensor], Tensor]
    ) -> tuple[Choice, Tensor]:
        """Return choices, equal on all ranks, and which are certain to be those of `Choose`, [n] bool.

        logits: [n, size] of the tokens from the id `start` on; they stay
        noise:  [n] float64 in [0, 1)
        limits: [n], of rows that are drawn
        gather: joins [n, m] of all parts in their order
        """


class RowLimits(Protocol):
    """What requests are drawn by, looked up by their rows in the batch."""

    def __call__(self, rows: Tensor, positions: Tensor, seeds: Tensor, limits: Tensor) -> Tensor:
        """Return [1 + columns, n] float64: in [0, 1), by seed and position, then the limits of each row.

        rows, positions: [n] int64; a position counts a request's output tokens
        seeds:           [num_rows, 1] int64
        limits:          [num_rows, columns] float64, contiguous
        """


class Forbid(Protocol):
    """Tokens that some rows may not choose."""

    def __call__(self, logits: Tensor, rows: Tensor, numbers: Tensor, words: Tensor) -> None:
        """Set the logits of all tokens to -inf whose bits are not set; in place.

        logits:        [n, vocab_size] float32, contiguous rows
        rows, numbers: [m] int64: rows of the logits, distinct, and the mask of each
        words:         [masks, ceil(vocab_size / 32)] int32, contiguous: bit i of word w = token 32 w + i
        """


Widen = Callable[[Tensor], Tensor]
"""Returns logits [n, vocab_size] in float32, contiguous: the argument itself if it is that already."""


class TokenLists(NamedTuple):
    """The tokens that occur in requests: a row of the tables for each request that wants to know.

    rows:    [n] int64, the row of each request in the tables
    lengths: [n] int64, entries of each
    ids:     [capacity, columns] int64, no token twice in a list; -1 is none, what follows is arbitrary
    counts:  [capacity, vocab_size] int32: how often it was chosen, + IN_PROMPT if it stands in the prompt
    longest: the largest of the lengths
    """

    rows: Tensor
    lengths: Tensor
    ids: Tensor
    counts: Tensor
    longest: int


IN_PROMPT = 1 << 30
"""Mark of a token that the repetition penalty has to see in the prompt."""


class Penalize(Protocol):
    """Repetition, frequency and presence penalties."""

    def __call__(
        self, logits: Tensor, rows: Tensor, lists: TokenLists, owners: Tensor, strengths: Tensor
    ) -> None:
        """Change the logits of tokens that occur, in place.

        logits:    [m, vocab_size] float32, contiguous rows
        rows:      [n] int64, distinct: the row of each request in `logits`
        owners:    [n] int64, that in `strengths`
        strengths: [capacity, 3] float32, contiguous: repetition, frequency, presence
        """


Count = Callable[[TokenLists, Tensor], None]
"""Counts a token of each list, [n] int64, and appends it to the list, which has space; lengths stay."""


class Words(NamedTuple):
    """Bad words of requests; all integers are int64.

    rows:     [words], the row of each in the logits
    last:     [words], its last token
    prefixes: [words, width], contiguous: the tokens before it, the last of them first, then -1
    owners:   [words], its place in the lengths of outputs
    lists:    [words], its row in outputs
    """

    rows: Tensor
    last: Tensor
    prefixes: Tensor
    owners: Tensor
    lists: Tensor


class Ban(Protocol):
    """Bad words: their last tokens are impossible where the output ends with the tokens before them."""

    def __call__(self, logits: Tensor, words: Words, ids: Tensor, lengths: Tensor) -> None:
        """Set logits to -inf, in place.

        logits:  [m, vocab_size] float32, contiguous rows
        ids:     [capacity, columns] int64, outputs
        lengths: [capacity] int64, how many tokens of the output of each owner there are
        """


class Scores(NamedTuple):
    """Rows with equally many entries: token_ids, values, ranks are [n, 1 + k], the chosen token first."""

    token_ids: Tensor
    values: Tensor
    ranks: Tensor


WHOLE_VOCABULARY = -1


class Scored(NamedTuple):
    """Chosen tokens and the `num_top` most likely, or those listed instead; normalise: logprobs, not logits.

    rows:       [n] int64: the row of each in the logits
    token_ids:  [n] int64: the chosen tokens
    num_top:    WHOLE_VOCABULARY = all
    listed_ids: [n, k] int64
    """

    rows: Tensor
    token_ids: Tensor
    num_top: int
    normalise: bool
    listed_ids: Tensor | None = None


Score = Callable[[Tensor, Scored], Scores]
"""Scores tokens by logits [m, vocab_size] of any floating-point type, which stay.

A token's rank is 1 + the number of larger values.
"""


@dataclass(frozen=True)
class SamplingKernels:
    """The kernels that choose tokens."""

    choose: Choose
    row_limits: RowLimits
    widen: Widen
    forbid: Forbid
    ban: Ban
    penalize: Penalize
    count: Count
    score: Score
    draw_from_parts: DrawFromParts | None = None
    """None: all logits are gathered."""
    limits_dtype: type = np.float64
    """Of what `row_limits` is given; float32 for a device that has no other."""


class Truncation(NamedTuple):
    """Where each row's distribution ends: at a logit, and among equal ones at a token. Contiguous.

    values: [n] float32, the least likely logits that are kept; -inf = all
    ids:    [n] int32, the last token kept of those equal to `values`
    """

    values: Tensor
    ids: Tensor


Draw = Callable[[Tensor, Draws | None, Truncation | None], Choice]
"""`Choose`, where the ends of the distributions are known; logits stay.

Tokens stand in the order of their ids, each as wide as it is likely; the one that holds the noise is drawn.
"""
FindTruncation = Callable[[Tensor, Limits], Truncation]
"""Finds where min_p, top_k and then top_p end each row's distribution, for `Draw`; logits stay.

top_k keeps all tokens as likely as the k-th, top_p no more than needed.
"""


@dataclass(frozen=True)
class TruncateAndDraw:
    """`Choose` by two kernels: one finds where the limits end each row's distribution, one draws."""

    draw: Draw
    truncate: FindTruncation

    def __call__(self, logits: Tensor, draws: Draws | None = None, limits: Limits | None = None) -> Choice:
        """See Choose."""
        return self.draw(logits, draws, None if limits is None else self.truncate(logits, limits))
