"""The family of activation functions."""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Gate = Literal["silu", "gelu", "gelu_tanh"]


class Activation(Protocol):
    """An element-wise activation."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return act(x); the `_and_mul` kinds take x = (gate, up) side by side and return act(gate) * up.

        x: [T, I] (or [T, 2 I]), contiguous; returns a new tensor [T, I]
        """


@dataclass(frozen=True)
class ActivationKernels:
    """The kernels of activation functions."""

    silu_and_mul: Activation
    gelu_and_mul: Activation
    gelu_tanh_and_mul: Activation
    gelu: Activation
    gelu_tanh: Activation
