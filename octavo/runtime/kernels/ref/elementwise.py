"""References of normalisation, activations and plain products."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.norms import ResidualUpdate

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See norms.RMSNorm."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def add_norm(x: ResidualUpdate, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    """See norms.AddNorm."""
    total = x + residual if isinstance(x, Tensor) else (x.parts.sum(0) + residual.float()).to(residual.dtype)
    return rms_norm(total, weight, eps), total


def sandwich_norm(
    x: Tensor, inner: Tensor, weight: Tensor, eps: float, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """See norms.SandwichNorm."""
    return add_norm(rms_norm(x, inner, eps), weight, eps, residual)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor:
    """See norms.LayerNorm."""
    total = x if residual is None else residual + x
    return functional.layer_norm(total, x.shape[1:], weight, bias, eps)


def rotary_tables(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """See attention.RotaryTables."""
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def join(*parts: Tensor) -> Tensor:
    """See linear.Join."""
    return torch.cat(parts, dim=1)


def activate(x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
    """See activations.Activate."""
    if not gated:
        return _ACTIVATIONS[activation](x)
    gate, up = x.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up


def gated_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See LinearKernels.gated_matmul."""
    return activate(matmul(x, weight, bias), "silu", gated=True)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See linear.Matmul."""
    return functional.linear(x, weight, bias)
