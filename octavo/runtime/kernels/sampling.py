"""The sampling family: choosing tokens."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class Cut(NamedTuple):
    """Where each row's distribution ends: at a logit, and among equal ones at a token. Contiguous.

    values: [n] float32, the least likely logits that are kept; -inf = all
    ids:    [n] int32, the last token kept of those equal to `values`
    """

    values: Tensor
    ids: Tensor


class Draw(Protocol):
    """One token per row."""

    def __call__(
        self,
        logits: Tensor,
        temperature: Tensor | None = None,
        noise: Tensor | None = None,
        cut: Cut | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (token ids [n] int64, each row's largest logit [n] float32: not finite = no valid choice).

        logits:       [n, vocab_size] of any floating-point type, contiguous rows
        temperature:  [n] float64; 0, or None for all rows = the likeliest token, of equal ones the lowest id
        noise:        [n] float64 in [0, 1): tokens stand in the order of their ids, each as wide as it is
                      likely; the one that holds this point is drawn
        """


class RowLimits(Protocol):
    """What rows are drawn by, looked up by slot."""

    def __call__(self, slots: Tensor, positions: Tensor, seeds: Tensor, limits: Tensor) -> Tensor:
        """Return [1 + columns, n] float64: in [0, 1), by seed and position, then the limits of each row.

        slots, positions: [n] int64; a position counts a request's output tokens
        seeds:            [num_slots, 1] int64
        limits:           [num_slots, columns] float64, contiguous
        """


class FindCut(Protocol):
    """Where min_p, top_k and then top_p end each row's distribution."""

    def __call__(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> Cut:
        """Return what `Draw` takes. top_k keeps all tokens as likely as the k-th, top_p no more than needed.

        logits:       as in Draw
        temperature:  [n] float64, > 0 where anything is cut
        top_k, top_p, min_p: [n] float64; < 1, ≥ 1 and 0 = off
        """


@dataclass(frozen=True)
class SamplingKernels:
    """The kernels that choose tokens."""

    draw: Draw
    row_limits: RowLimits
    cut: FindCut
