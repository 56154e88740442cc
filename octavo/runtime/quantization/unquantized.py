"""Weights as plain numbers.

Where they have the type of the activations, torch multiplies them. On CPU activations are float32: bf16 and
f16 weights stay as small as they are and are widened inside the kernel.
"""

import torch
from torch import Tensor
from torch.nn import functional

from octavo.config.engine import EngineConfig
from octavo.runtime.quantization.method import LinearMethod, Scheme, Storage
from octavo.runtime.quantization.parameter import DenseParameter, Layout, Parameter

_BLOCK_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class Unquantized(Scheme):
    """Floating-point tensors, from safetensors files or dummies."""

    @staticmethod
    def matches(config: EngineConfig) -> bool:
        """Whether the config announces no quantization."""
        return config.model.load_format != "gguf" and not config.checkpoint.config.get("quantization_config")

    def linear(self, name: str) -> LinearMethod:
        """A dense or a widening method."""
        del name  # every matrix is stored alike
        widen = self.storage.weight_dtype != self.storage.compute_dtype
        return WideningLinear(self.storage) if widen else DenseLinear(self.storage)


class DenseLinear(LinearMethod):
    """Weights and activations of one type."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def create(self, layout: Layout) -> dict[str, Parameter]:
        """One tensor."""
        self._weight = DenseParameter(layout, self._storage.weight_dtype, self._storage.device)
        return {"weight": self._weight}

    def after_load(self) -> None:
        """Nothing to repack."""

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by torch."""
        return functional.linear(x, self._weight.data, bias)

    def gather(self, ids: Tensor) -> Tensor:
        """Look up rows."""
        return functional.embedding(ids, self._weight.data).to(self._storage.compute_dtype)


class WideningLinear(DenseLinear):
    """Narrow weights under wide activations."""

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the block kernel: a narrow number is a block of one."""
        weight = self._weight.data
        type_name = _BLOCK_TYPES[weight.dtype]
        return self._storage.kernels.block_matmul(x, weight.view(torch.uint8), type_name, bias)
