"""The activation functions of feed-forward blocks."""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

Activation = Literal["silu", "gelu", "gelu_tanh"]


class Activate(Protocol):
    """An element-wise activation."""

    def __call__(self, x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
        """Return act(x); gated: x is (gate, up) side by side, and the result is act(gate) * up.

        x: [T, I], if gated [T, 2 I], contiguous; returns a new tensor [T, I]
        """


Xielu = Callable[[Tensor, list[Tensor]], Tensor]  # of rows [T, I] and alpha_p, alpha_n, beta, eps, [1] each


def xielu(x: Tensor, learned: list[Tensor]) -> Tensor:
    """Return alpha_p x^2 + beta x above 0, alpha_n (e^min(x, eps) - 1 - x) + beta x below."""
    alpha_p, alpha_n, beta, eps = learned
    wide = x.float()
    above = functional.softplus(alpha_p) * wide.square()
    below = (beta + functional.softplus(alpha_n)) * (torch.expm1(torch.minimum(wide, eps)) - wide)
    return (torch.where(wide > 0, above, below) + beta * wide).to(x.dtype)
