"""References of normalisation, activations and plain products."""

from typing import overload

import torch
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.norms import PartialSums


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """See norms.RMSNorm."""
    if residual is not None:
        x = x + residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = (normed * weight.float()).to(x.dtype)
    return y if residual is None else (y, x)


def sum_norm(x: PartialSums, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    """See norms.SumNorm."""
    total = (x.parts.sum(0) + residual.float()).to(residual.dtype)
    return rms_norm(total, weight, eps), total


def sandwich_norm(
    x: Tensor, inner: Tensor, weight: Tensor, eps: float, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """See norms.SandwichNorm."""
    return rms_norm(rms_norm(x, inner, eps), weight, eps, residual)


def rotary_tables(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """See attention.RotaryTables."""
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def silu_and_mul(x: Tensor) -> Tensor:
    """See activations.Activation."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_and_mul(x: Tensor) -> Tensor:
    """See activations.Activation."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate) * up


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """See activations.Activation."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def gelu(x: Tensor) -> Tensor:
    """See activations.Activation."""
    return functional.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """See activations.Activation."""
    return functional.gelu(x, approximate="tanh")


def gated_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See LinearKernels.gated_matmul."""
    return silu_and_mul(matmul(x, weight, bias))


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See linear.Matmul."""
    return functional.linear(x, weight, bias)
