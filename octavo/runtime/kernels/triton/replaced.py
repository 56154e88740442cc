"""What adapters change beside products: whole matrices of their own in Triton, and embeddings.

Grids depend on the number of tokens alone, and addresses are read from tables: a captured step serves
whatever adapters come later. A token's company changes no bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.adapters import ENTRY, LowRankTable
from octavo.runtime.kernels.triton.adapters import GROUP, TYPES, shrink
from octavo.runtime.kernels.triton.launch import cdiv

_TILE_WHOLE = 64  # outputs of a whole matrix
_TILE_LOOKUP = 256


# fmt: off
@triton.jit
def _replace_kernel(
    x, out, groups, wholes, entries, bias, x_stride, out_stride, inputs, outputs, tiles,
    W: tl.constexpr, DOT: tl.constexpr, BIASED: tl.constexpr, ENTRY: tl.constexpr, TILE: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):
    """Multiply one group's tokens with some rows of a whole matrix, if they have one."""
    place = groups + tl.program_id(0) // tiles * (TILE + 1)
    slot = tl.maximum(tl.load(place), 0)
    whole = tl.load(wholes + slot)
    if whole != 0:
        token = tl.load(place + 1 + tl.arange(0, TILE))
        n = tl.program_id(0) % tiles * TILE_N + tl.arange(0, TILE_N)
        there, row, inside = (token >= 0)[:, None], tl.maximum(token, 0).to(tl.int64)[:, None], n < outputs
        rows = tl.multiple_of(whole.to(tl.pointer_type(W)), 16) + n.to(tl.int64)[:, None] * inputs
        total = shrink(x + row * x_stride, there, rows, inside[:, None], 0, inputs, DOT, TILE, TILE_N, TILE_K)
        if BIASED:
            total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        own = tl.load(entries + slot * ENTRY + 5)
        if own != 0:
            total += tl.load(own.to(tl.pointer_type(tl.float32)) + n, mask=inside, other=0.0)[None, :]
        target = out + row * out_stride + n[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=there & inside[None, :])


@triton.jit
def _lookup_kernel(
    ids, out, slots, entries, wholes, scale, out_stride, width,
    W: tl.constexpr, ENTRY: tl.constexpr, STEP: tl.constexpr, TILE_N: tl.constexpr,
):
    """Change some values of one token's embedding."""
    token, n, r = tl.program_id(0), tl.program_id(1) * TILE_N + tl.arange(0, TILE_N), tl.arange(0, STEP)
    token_id, slot, inside = tl.load(ids + token), tl.load(slots + token), n < width
    whole, entry = tl.load(wholes + slot, mask=token_id >= 0, other=0), entries + slot * ENTRY
    down, up = tl.load(entry).to(tl.pointer_type(W)), tl.load(entry + 1).to(tl.pointer_type(W))
    rank, target = tl.load(entry + 2, mask=token_id >= 0, other=0), out + token.to(tl.int64) * out_stride + n
    if whole != 0:
        row = tl.load(whole.to(tl.pointer_type(W)) + token_id * width + n, mask=inside, other=0.0)
        tl.store(target, (row.to(tl.float32) * scale).to(out.dtype.element_ty), mask=inside)
    elif rank != 0:
        total = tl.zeros([TILE_N], tl.float32)
        for first in range(0, rank, STEP):
            value = tl.load(down + token_id * rank + first + r, mask=first + r < rank, other=0.0)
            mask = (first + r < rank)[:, None] & inside[None, :]
            weights = tl.load(up + (first + r)[:, None] * width + n[None, :], mask=mask, other=0.0)
            total += tl.sum(value.to(tl.float32)[:, None] * weights.to(tl.float32), 0)
        old = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, (old + total * scale).to(out.dtype.element_ty), mask=inside)
# fmt: on


def replace(x: Tensor, out: Tensor, groups: Tensor, table: LowRankTable, bias: Tensor | None) -> None:
    """See adapters.Replace."""
    tiles = cdiv(out.shape[1], _TILE_WHOLE)
    if not len(groups):
        return
    dot = x.dtype if x.dtype == table.dtype else torch.float32
    tensors = x, out, groups, table.whole_entries, table.entries, out if bias is None else bias
    sizes = x.stride(0), out.stride(0), x.shape[1], out.shape[1], tiles
    types = {"W": TYPES[table.dtype], "DOT": TYPES[dot], "BIASED": bias is not None, "ENTRY": ENTRY}
    tile = {"TILE": GROUP, "TILE_N": _TILE_WHOLE, "TILE_K": 32 if dot == torch.float32 else 128}
    _replace_kernel[(len(groups) * tiles,)](*tensors, *sizes, **types, **tile)


def change_lookup(ids: Tensor, out: Tensor, slots: Tensor, table: LowRankTable, scale: float) -> None:
    """See adapters.ChangeLookup."""
    (tokens, width), entries = out.shape, (table.entries, table.whole_entries)
    grid, kind = (tokens, cdiv(width, _TILE_LOOKUP)), {"W": TYPES[table.dtype], "ENTRY": ENTRY}
    if tokens:
        how = kind | {"STEP": GROUP, "TILE_N": _TILE_LOOKUP}
        _lookup_kernel[grid](ids, out, slots, *entries, float(scale), out.stride(0), width, **how)
