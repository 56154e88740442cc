"""Norms add a term to the residual stream and normalise the sum, which is one kernel (`add`).

That kernel may compute the term, too: a product's partial sums, or another norm (`defer`).
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from octavo.runtime.layers.build import BuildContext, Layer
from octavo.runtime.quantization.method import Term as Term  # noqa: PLC0414  # for models
from octavo.runtime.quantization.parameter import Layout, Shard, vector


@dataclass(frozen=True, kw_only=True)
class NormArch:
    """A NormArch says of what kind a model's norms are."""

    kind: Literal["rms", "layer"] = "rms"
    weight: bool = True
    bias: bool = False
    eps: float = 1e-6


class Norm(Layer):
    """Every kind of norm has this interface."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of x."""

    def defer(self, x: Tensor) -> Term:
        """Return `forward` as a term for an RMS norm that adds it."""
        return self.forward(x)

    def add(self, x: Term, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (normalised sum, sum) of x and the residual stream, which begins as None."""
        assert isinstance(x, Tensor), "only RMS norms take deferred terms"
        total = x if residual is None else residual + x
        return self.forward(total), total

    def of_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the normalised sum where that is the residual stream."""
        return self.forward(residual + x)


class NoNorm(Norm):
    """Stands in for a norm that an architecture does not have; some multiply by a constant there."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self._factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x if self._factor == 1.0 else x * self._factor


class LayerScale(Norm):
    """Stands in for a norm behind attention or MLP: multiplies by weights (https://arxiv.org/abs/2103.17239)."""

    def __init__(self, build: BuildContext, size: int) -> None:
        super().__init__()
        self._weight = self.make_vector(build, vector(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self._weight


class RMSNorm(Norm):
    """Divides by the root mean square (https://arxiv.org/abs/1910.07467); loading sums Gemma's 1 + w."""

    def __init__(self, build: BuildContext, size: int, eps: float, *, defers: bool = False) -> None:
        """Make the weight. defers: `forward` may be left to the RMS norm, of the same eps, that adds it."""
        super().__init__()
        self.weight = self.make_vector(build, vector(size))
        self._eps, self._kernels = eps, build.kernels.norms
        self._sandwich = self._kernels.sandwich_norm if defers else None

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.weight, self._eps)

    def defer(self, x: Tensor) -> Term:
        return self.forward(x) if self._sandwich is None else partial(self._sandwich, x, self.weight)

    def add(self, x: Term, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if not isinstance(x, Tensor):
            assert residual is not None
            return x(self.weight, self._eps, residual)
        if residual is None:
            return self.forward(x), x
        return self._kernels.add_norm(x, self.weight, self._eps, residual)


class LayerNorm(Norm):
    """Normalises mean and variance (https://arxiv.org/abs/1607.06450), with or without weight and bias."""

    def __init__(
        self, build: BuildContext, size: int, eps: float, *, weight: bool = True, bias: bool = False
    ) -> None:
        super().__init__()
        self._shape, self._eps = (size,), eps
        self._weight = self.make_vector(build, vector(size)) if weight else None
        self._bias = self.make_vector(build, vector(size), "bias") if bias else None
        self._kernel = build.kernels.norms.layer_norm

    def forward(self, x: Tensor) -> Tensor:
        if self._kernel is None or x.dim() > 2:
            return functional.layer_norm(x, self._shape, self._weight, self._bias, self._eps)
        return self._kernel(x, self._weight, self._bias, self._eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        if self._kernel is None:
            return super().of_sum(x, residual)
        return self._kernel(x, self._weight, self._bias, self._eps, residual)


class HeadLayerNorm(Norm):
    """Applies a LayerNorm without bias to every head, each with weights of its own.

    A checkpoint holds one vector per head, named by its number, or all of them as one.
    """

    def __init__(self, build: BuildContext, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self._shape, self._eps = (head_dim,), eps
        mine = build.split("weight", num_heads, repeat=True)
        kept = [head_dim * (mine.start <= i < mine.start + mine.size) for i in range(num_heads)]
        shards = tuple(Shard(str(i), head_dim, 0, size) for i, size in enumerate(kept))
        self._weight = self.make_vector(build, Layout(shards)).view(mine.size, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; x: [T, heads of this rank, head_dim]."""
        return functional.layer_norm(x, self._shape, eps=self._eps) * self._weight


class AllHeadsRMSNorm(Norm):
    """Divides by the root mean square over all heads of queries or keys together, wherever they are.

    The mean over the ranks is that over the heads, because every rank keeps equally many, and of repeated
    ones every head equally often.
    """

    def __init__(self, build: BuildContext, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        mine = build.split("weight", num_heads * head_dim, head_dim, repeat=True)
        self._weight, self._eps = self.make_vector(build, Layout((mine._replace(name=""),))), eps
        self._kernel, self._parallel = build.kernels.norms.rms_norm, build.parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; x: [T, heads of this rank, head_dim]."""
        flat = x.flatten(1)
        if self._parallel.tp_size == 1:
            return self._kernel(flat, self._weight, self._eps).view_as(x)
        squares = flat.float().square().mean(-1, keepdim=True)
        mean = self._parallel.all_reduce(squares) / self._parallel.tp_size
        normal = flat.float() * torch.rsqrt(mean + self._eps)
        return (normal * self._weight).to(x.dtype).view_as(x)


def make_norm(arch: NormArch, build: BuildContext, size: int, *, defers: bool = False) -> Norm:
    """Return a norm over vectors of `size`. defers: see RMSNorm."""
    if arch.kind == "layer":
        return LayerNorm(build, size, arch.eps, weight=arch.weight, bias=arch.bias)
    return RMSNorm(build, size, arch.eps, defers=defers)
