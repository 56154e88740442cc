"""Normalisation. `add` is the fused form that decoder layers use: add to the residual stream, then normalise
it.
"""

from abc import abstractmethod

from torch import Tensor
from torch.nn import functional

from octavo.runtime.layers.build import BuildContext, Layer
from octavo.runtime.quantization.parameter import vector


class Norm(Layer):
    """The interface of all kinds."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of x."""

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (normalised sum, sum) of x and the residual stream, which begins as None."""
        total = x if residual is None else residual + x
        return self.forward(total), total


class NoNorm(Norm):
    """The place of a norm that an architecture does not have."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        return x


class RMSNorm(Norm):
    """Root mean square (https://arxiv.org/abs/1910.07467). Gemma's 1 + w is summed while loading."""

    def __init__(self, build: BuildContext, size: int, eps: float) -> None:
        super().__init__()
        parameter = build.dense(vector(size))
        self.parameters_by_name["weight"] = parameter
        self._weight = parameter.data
        self._eps = eps
        self._kernel = build.kernels.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return self._kernel(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add and normalise in one kernel."""
        if residual is None:
            return self.forward(x), x
        return self._kernel(x, self._weight, self._eps, residual)


class LayerNorm(Norm):
    """Mean and variance, with or without bias."""

    def __init__(self, build: BuildContext, size: int, eps: float, bias: bool) -> None:
        super().__init__()
        self._shape, self._eps = (size,), eps
        parameters = {name: build.dense(vector(size)) for name in ("weight", "bias")[: 1 + bias]}
        self.parameters_by_name |= parameters
        self._weight = parameters["weight"].data
        self._bias = parameters["bias"].data if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)
