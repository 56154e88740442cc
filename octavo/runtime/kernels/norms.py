"""The norm family. T = tokens; "token-strided" = contiguous in all but the first axis."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class RMSNorm(Protocol):
    """Root mean square normalisation over the last axis."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) * weight.

        x:      [T, size] or [T, H, size], token-strided; unchanged
        weight: [size], of x's dtype
        """


class PartialSums(NamedTuple):
    """A product that is still a sum. parts: [P, T, size] float32, contiguous, one per share of its inputs."""

    parts: Tensor


ResidualUpdate = Tensor | PartialSums
"""What a norm adds to the residual stream."""


class AddNorm(Protocol):
    """The residual stream's sum with an update, and the norm of that."""

    def __call__(
        self, x: ResidualUpdate, weight: Tensor, eps: float, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (`RMSNorm` of x + residual, x + residual); what was in parts is rounded once, as that sum.

        x:        partial sums only where the platform's `SplitMatmul` makes them
        residual: [T, size], token-strided; unchanged, as is x
        """


class SandwichNorm(Protocol):
    """The norm of what a layer gives and, once that is added to the residual stream, the norm of the sum."""

    def __call__(
        self, x: Tensor, inner: Tensor, weight: Tensor, eps: float, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return, to the bit, what `AddNorm` by `weight` gives for `RMSNorm` of x by `inner`.

        x, residual: [T, size], token-strided; unchanged
        """


class LayerNorm(Protocol):
    """The LayerNorm of an update, or of its sum with the residual stream."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return LayerNorm(x + residual) * weight + bias; x and residual, [T, size], are token-strided."""


@dataclass(frozen=True)
class NormKernels:
    """The kernels of norms; None where a platform has no fused one."""

    rms_norm: RMSNorm
    add_norm: AddNorm
    sandwich_norm: SandwichNorm | None = None
    layer_norm: LayerNorm | None = None
