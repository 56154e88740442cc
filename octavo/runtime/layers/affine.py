"""`Affine` keeps a kernel and a bias for one of torch's functions, such as a convolution."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from octavo.runtime.layers.build import BuildContext, Layer
from octavo.runtime.quantization.parameter import Layout, vector


class Affine(Layer):
    """Has a kernel, or a factor, and a bias, for one of torch's functions."""

    def __init__(self, build: BuildContext, shape: Sequence[int], function: Callable[..., Tensor]) -> None:
        super().__init__()
        self._weight = self.make_vector(build, Layout(vector(shape[0]).shards, tuple(shape[1:])))
        self._bias, self._function = self.make_vector(build, vector(shape[0]), "bias"), function

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        """Return what the function makes of x, the kernel and the bias; `how` goes to the function."""
        return self._function(x, self._weight, self._bias, **how)
