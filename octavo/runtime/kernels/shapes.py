"""The table of nothing: every op as the tensors that it makes on a GPU, of torch's device "meta".

For planning memory without a device. Which tensors an op makes is what its Triton kernel allocates; parts of
a kilobyte per row are left out. Nothing is computed, and drawing tokens is no op of a plan.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.adapters import AdapterKernels, LowRankTable, shares_of_inputs
from octavo.runtime.kernels.attention import AttentionKernels, HeadInputs
from octavo.runtime.kernels.experts import ExpertKernels, Router, Routing
from octavo.runtime.kernels.linear import LinearKernels, Packed
from octavo.runtime.kernels.norms import NormKernels
from octavo.runtime.kernels.recurrent import SCAN_CHUNK, RecurrentKernels, Scanned
from octavo.runtime.kernels.ref.cache import cut_chunks
from octavo.runtime.kernels.ref.elementwise import join, rotary_tables
from octavo.runtime.kernels.ref.steps import STEP_KERNELS
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable


def shape_table(dtype: torch.dtype) -> KernelTable:
    """Return the table. dtype: of activations made from packed weights."""

    def dequantize(matrix: Packed, places: Tensor | None = None, scale: float = 1.0) -> Tensor:
        blocks = matrix.blocks if places is None else matrix.blocks[places]
        return blocks.new_empty((len(blocks), matrix.num_inputs), dtype=dtype)

    def block_matmul(
        x: Tensor, matrix: Packed, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Unpack the matrix first, as a whole, as for many rows."""
        made = _matmul(x, dequantize(matrix), bias)
        return made if out is None else out

    return KernelTable(
        name="shapes",
        attention=AttentionKernels(
            _store_kv, _paged_attention, rotary_tables, cut_chunks, _paged_attention, _latent_prompts
        ),
        norms=NormKernels(_rms_norm, _add_norm, layer_norm=_layer_norm),
        activate=_activate,
        linear=LinearKernels(_matmul, _gated_matmul, dequantize, block_matmul, _select_inputs, join),
        experts=ExpertKernels(_route, _dense_experts, _block_experts),
        recurrent=RecurrentKernels(_rows_like, _scan, _rows_like),
        sampling=ref_table().sampling,
        steps=STEP_KERNELS,
        adapters=AdapterKernels(_add_low_rank, _nothing, _nothing),
    )


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _select_inputs(x: Tensor, places: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], len(places)))


def _gated_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Make the product of many rows first, as a whole."""
    return _activate(_matmul(x, weight, bias), "silu", gated=True)


def _activate(x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // (1 + gated)))


def _route(logits: Tensor, bias: Tensor | None, router: Router, ids: Tensor | None = None) -> Routing:
    size = len(logits), router.top_k
    return Routing(logits.new_empty(size, dtype=torch.int32), logits.new_empty(size, dtype=torch.float32))


def _dense_experts(x: Tensor, routing: Routing, up: Tensor, *others: Any) -> Tensor:
    """Make the inner layers and the outputs of all chosen experts before their sums."""
    inner = x.new_empty((routing.ids.numel(), up.shape[1] // 2))
    made = x.new_empty((len(inner), x.shape[1]))
    total = torch.empty_like(x)
    del inner, made
    return total


def _block_experts(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x)


def _add_low_rank(x: Tensor, out: Tensor, groups: Tensor, table: LowRankTable, bias: Tensor | None) -> None:
    """Make the inner values, of the largest rank."""
    parts = len(table.kept_bounds) - 1
    x.new_empty((shares_of_inputs(x.shape[1]), len(x), parts * table.most_rank), dtype=torch.float32)


def _nothing(*given: Any) -> None:
    """Make nothing."""


def _rows_like(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


def _scan(new: Scanned, *others: Any) -> Tensor:
    """Make the inverses of chunks before the result, by the delta rule."""
    if new.strengths is not None:
        new.values.new_empty((*new.values.shape[:2], SCAN_CHUNK), dtype=torch.float32)
    return new.values.new_empty(new.values.shape)


def _store_kv(new: HeadInputs, cache: Tensor, slots: Tensor) -> Tensor:
    is_kept = cache.shape[1] == 1 or (new.rotation is None and new.norms is None)
    return new.q if is_kept else torch.empty_like(new.q)


def _paged_attention(q: Tensor, *tables: Any, **how: Any) -> Tensor:
    return torch.empty_like(q)


def _latent_prompts(prompts: Any, out: Tensor) -> None:
    del prompts, out


def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor:
    return torch.empty_like(x)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


def _add_norm(x: Any, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)
