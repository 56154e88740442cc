"""The table of nothing: every op as the tensors that it makes on a GPU, of torch's device "meta".

For planning memory without a device. Which tensors an op makes is what its Triton kernel allocates; parts of
a kilobyte per row are left out. Nothing is computed, and drawing tokens is no op of a plan.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.base.gguf import BLOCK_TYPES
from octavo.runtime.kernels.activations import ActivationKernels
from octavo.runtime.kernels.attention import AttentionKernels, HeadInputs
from octavo.runtime.kernels.linear import LinearKernels
from octavo.runtime.kernels.norms import NormKernels
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.kernels.ref.elementwise import rotary_tables
from octavo.runtime.kernels.ref.steps import STEP_KERNELS
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable

_BLOCKS = {kind.name: kind for kind in BLOCK_TYPES.values()}


def shape_table(dtype: torch.dtype) -> KernelTable:
    """dtype: of activations made from packed weights."""

    def dequantize(blocks: Tensor, type_name: str) -> Tensor:
        kind = _BLOCKS[type_name]
        rows, num_bytes = blocks.shape
        return blocks.new_empty((rows, num_bytes // kind.num_bytes * kind.block), dtype=dtype)

    def gather(blocks: Tensor, places: Tensor, type_name: str, scale: float = 1.0) -> Tensor:
        del scale
        return dequantize(blocks[places], type_name)

    def block_matmul(
        x: Tensor,
        blocks: Tensor,
        type_name: str,
        bias: Tensor | None = None,
        input_precision: InputPrecision = "float32",
        out: Tensor | None = None,
    ) -> Tensor:
        """Of many rows: unpacked first, as a whole."""
        del input_precision
        made = _matmul(x, dequantize(blocks, type_name), bias)
        return made if out is None else out

    return KernelTable(
        name="shapes",
        attention=AttentionKernels(_store_kv, _paged_attention, rotary_tables),
        norms=NormKernels(_rms_norm),
        activations=ActivationKernels(_half, _half, _half, _same, _same),
        linear=LinearKernels(_matmul, _gated_matmul, dequantize, gather, block_matmul),
        sampling=ref_table().sampling,
        steps=STEP_KERNELS,
    )


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    del bias
    return x.new_empty((x.shape[0], weight.shape[0]))


def _gated_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of many rows: the product first, as a whole."""
    return _half(_matmul(x, weight, bias))


def _half(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def _store_kv(new: HeadInputs, cache: Tensor, slots: Tensor) -> Tensor:
    del cache, slots
    return new.q if new.rotation is None and new.norms is None else torch.empty_like(new.q)


def _same(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _paged_attention(q: Tensor, *tables: Any, **how: Any) -> Tensor:
    del tables, how
    return torch.empty_like(q)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
    del weight, eps
    out = torch.empty_like(x)
    return out if residual is None else (out, torch.empty_like(x))
