"""Twins of normalisation, rotary embedding and activations."""

from typing import overload

import torch
from torch import Tensor
from torch.nn import functional


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """See table.RMSNorm."""
    if residual is not None:
        x = x + residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = (normed * weight.float()).to(x.dtype)
    return y if residual is None else (y, x)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    """See table.ApplyRope."""
    half = cos.shape[-1]
    rotated = x[..., : 2 * half]
    first, second = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    a, b = first.float(), second.float()
    c, s = cos[:, None, :], sin[:, None, :]
    new_first, new_second = a * c - b * s, b * c + a * s
    first.copy_(new_first)
    second.copy_(new_second)


def silu_and_mul(x: Tensor) -> Tensor:
    """See table.Activation."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_and_mul(x: Tensor) -> Tensor:
    """See table.Activation."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate) * up


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """See table.Activation."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def gelu(x: Tensor) -> Tensor:
    """See table.Activation."""
    return functional.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """See table.Activation."""
    return functional.gelu(x, approximate="tanh")
