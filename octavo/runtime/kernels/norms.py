"""The norm family. T = tokens; "token-strided" = contiguous in all but the first axis."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload

from torch import Tensor


class RMSNorm(Protocol):
    """Root mean square normalisation over the last axis."""

    @overload
    def __call__(self, x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
    @overload
    def __call__(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return x / rms(x) * weight; with `residual`, (the same of x + residual, x + residual).

        x, residual:  [T, size] or [T, H, size], token-strided; unchanged
        weight:       [size], of x's dtype
        """


class SandwichNorm(Protocol):
    """The norm of what a layer gives and, once that is added to the residual stream, the norm of the sum."""

    def __call__(
        self, x: Tensor, inner: Tensor, weight: Tensor, eps: float, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """To the bit what `RMSNorm` by `weight` gives for that by `inner` and `residual`.

        x, residual: [T, size], token-strided; unchanged
        """


class PartialSums(NamedTuple):
    """A product that is still a sum. parts: [P, T, size] float32, contiguous, one per share of its inputs."""

    parts: Tensor


ResidualUpdate = Tensor | PartialSums
"""What a norm adds to the residual stream."""


class SumNorm(Protocol):
    """`RMSNorm` with a residual stream, for what `SplitMatmul` may return."""

    def __call__(self, x: PartialSums, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As of the sum of x, rounded once: when the stream is added. residual: [T, size], token-strided."""


@dataclass(frozen=True)
class NormKernels:
    """The kernels of norms; None where a platform has no fused one."""

    rms_norm: RMSNorm
    sandwich_norm: SandwichNorm | None = None
