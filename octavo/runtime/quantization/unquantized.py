"""Unquantized weights are plain numbers.

On a GPU the kernel for such matrices multiplies them. On CPU activations are float32 and the block kernel
multiplies: bf16 and f16 weights stay as small as they are, and a row's result does not depend on the rest of
the batch, as it does in torch.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor
from torch.nn import functional

from octavo.config.engine import EngineConfig
from octavo.runtime.kernels.activations import Activation
from octavo.runtime.quantization.blocks import blocks_of_one
from octavo.runtime.quantization.experts import DenseExperts, HostExperts, WidenedExperts
from octavo.runtime.quantization.gguf import GGUFLinear
from octavo.runtime.quantization.method import ExpertsMethod, LinearMethod, Scheme, Storage, Term
from octavo.runtime.quantization.parameter import DenseParameter, Layout, Parameter
from octavo.runtime.quantization.stored_config import stored_quantization


class Unquantized(Scheme):
    """Serves floating-point tensors, from safetensors files or dummies."""

    @classmethod
    def matches(cls, config: EngineConfig) -> bool:
        return config.model.load_format != "gguf" and not stored_quantization(config)

    def linear(self, name: str) -> LinearMethod:
        storage = replace(self.storage, device=self.storage.device_of(name))
        return WidenedLinear(storage) if self.storage.device.type == "cpu" else DenseLinear(storage)

    def experts(self, name: str) -> ExpertsMethod:
        if self.storage.device.type != "cpu" and self.storage.has_experts_on_host(name):
            return HostExperts(self.storage)
        storage = replace(self.storage, device=self.storage.device_of(name))
        return WidenedExperts(storage) if self.storage.device.type == "cpu" else DenseExperts(storage)


class DenseLinear(LinearMethod):
    """Multiplies weights and activations of one type."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def create(self, layout: Layout) -> dict[str, Parameter]:
        self._weight = _make_weight(layout, self._storage)
        return {"weight": self._weight}

    def matrix(self) -> Tensor:
        return self._weight.data

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._storage.kernels.matmul(x, self._weight.data, bias)

    def apply_gated(self, x: Tensor, bias: Tensor | None, gate: Activation) -> Tensor | None:
        return self._storage.kernels.gated_matmul(x, self._weight.data, bias) if gate == "silu" else None

    def apply_deferred(self, x: Tensor) -> Term:
        """Multiply; where partial sums are there sooner, the norm adds them up."""
        split = self._storage.kernels.split_product
        if split is None:
            return self.apply(x, None)
        product = split.matmul(x, self._weight.data)
        return product if isinstance(product, Tensor) else partial(split.norm, product)

    def roll(self, count: int) -> None:
        self._weight.data.copy_(self._weight.data.roll(count, 0))

    def gather(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        rows = functional.embedding(ids, self._weight.data).to(self._storage.compute_dtype)
        return rows if scale == 1.0 else rows * scale


class WidenedLinear(GGUFLinear):
    """Multiplies weights of any width and float32 activations, as blocks of one number."""

    def create(self, layout: Layout) -> dict[str, Parameter]:
        self._weight = _make_weight(layout, self._storage)
        return {"weight": self._weight}

    def matrix(self) -> Tensor:
        return self._weight.data

    def after_load(self) -> None:
        self._keep([blocks_of_one(self._weight.data)])


def _make_weight(layout: Layout, storage: Storage) -> DenseParameter:
    data = storage.arena.empty(layout.shape, storage.weight_dtype, storage.device)
    return DenseParameter(layout, data)
