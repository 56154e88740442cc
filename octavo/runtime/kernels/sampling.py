"""The sampling family: choosing tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class Draws(NamedTuple):
    """How each row is drawn; both [n] float64.

    temperature: 0 = not at all: the largest logit, of equal ones the lowest id
    noise:       in [0, 1): the point of the distribution function that is drawn
    """

    temperature: Tensor
    noise: Tensor


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


class RowLimits(Protocol):
    """What requests are drawn by, looked up by their rows in the batch."""

    def __call__(self, rows: Tensor, positions: Tensor, seeds: Tensor, limits: Tensor) -> Tensor:
        """Return [1 + columns, n] float64: in [0, 1), by seed and position, then the limits of each row.

        rows, positions: [n] int64; a position counts a request's output tokens
        seeds:           [num_rows, 1] int64
        limits:          [num_rows, columns] float64, contiguous
        """


@dataclass(frozen=True)
class SamplingKernels:
    """The kernels that choose tokens."""

    choose: Choose
    row_limits: RowLimits


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
