"""The activation functions of feed-forward blocks."""

from typing import Literal, Protocol

from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh"]


class Activate(Protocol):
    """An element-wise activation."""

    def __call__(self, x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
        """Return act(x); gated: x is (gate, up) side by side, and the result is act(gate) * up.

        x: [T, I], if gated [T, 2 I], contiguous; returns a new tensor [T, I]
        """
