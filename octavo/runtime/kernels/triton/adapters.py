"""Low-rank changes of products: tokens grouped by adapter, then shrink (x down^T) and expand (inner up).

`group` is launched once a step. Grids depend on the number of tokens and on the table's largest rank alone:
a captured step serves whatever adapters come later, and programs without work return at once. A token's sums
have an order of their own: its company changes no bit. The inner values are kept in float32.

The kernel that shrinks begins early (see `launch`), beside the product, which was launched last and reads
the same inputs: of its programs the first alone waits for the product. The other begins when these have, and
waits, with its first weights at hand, for both. Each adapter's matrices are read once for up to 16 tokens, by
many small programs: what they have under way together is what memory needs to be busy. (Products of few rows
that add their changes themselves, shrunk by a kernel before them, were slower on an H100: of 64 rows and 16
adapters a layer took 245 µs instead of 206.)

A single row is shrunk by the first programs of its product, whose blocks leave no others room beside them; a
second kernel expands: a layer took 159 µs instead of 178, without adapters 150.
"""

from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.adapters import ENTRY, LowRankTable, shares_of_inputs
from octavo.runtime.kernels.triton.launch import (
    cdiv,
    overlapped,
    power_of_2,
    release,
    stages,
    wait,
)
from octavo.runtime.kernels.triton.matmul import NARROW, multiply_row

GROUP = 16  # tokens of one adapter, whose matrices are read once for them
_WINDOW = 128  # tokens among which groups are looked for, or twice as many
_FEW_TOKENS = 256
_TILE_ROW = 64  # outputs of a single row
_SHRINK = 128, 4, 2  # inputs of a tile, stages, warps
_EXPAND_FEW = 256, 4, 4  # outputs of a tile, tiles of a program, warps
_EXPAND = 128, 8, 2  # of more tokens
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


# fmt: off
@triton.jit(do_not_specialize=["num_tokens", "num_groups"])
def _group_kernel(slots, groups, num_tokens, num_groups, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Write the groups of a window: a slot, then its tokens."""
    window, i = tl.program_id(0), tl.arange(0, WINDOW)
    token = window * WINDOW + i
    slot = tl.load(slots + token, mask=token < num_tokens, other=0)
    alike = slot[:, None] == slot[None, :]
    rank = tl.sum((alike & (i[:, None] < i[None, :])).to(tl.int32), 0)
    is_first = (slot > 0) & (rank % TILE == 0)
    number = tl.cumsum(is_first.to(tl.int32), 0) - 1
    is_own_first = alike & (rank[:, None] == (rank - rank % TILE)[None, :])
    group = window * num_groups + tl.sum(tl.where(is_own_first, number[:, None], 0), 0)
    place = groups + group * (TILE + 1)
    tl.store(place, slot, mask=is_first)
    tl.store(place + 1 + rank % TILE, token, mask=slot > 0)


@triton.jit
def _shrink_kernel(
    x, inner, groups, entries, x_stride, inputs, per_split,
    ENTRY: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, W: tl.constexpr, DOT: tl.constexpr,
    SPLITS: tl.constexpr, TILE: tl.constexpr, TILE_R: tl.constexpr, TILE_K: tl.constexpr, PDL: tl.constexpr,
):
    """Multiply the tokens of a group with some rows of `down`, over a share of the inputs."""
    RANK_TILES: tl.constexpr = (RANKS + TILE_R - 1) // TILE_R
    release(PDL)
    split, task = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    part, tile = task // RANK_TILES % PARTS, task % RANK_TILES
    place = groups + task // (RANK_TILES * PARTS) * (TILE + 1)
    slot = tl.load(place)
    if slot > 0:
        entry = entries + slot * ENTRY
        token = tl.load(place + 1 + tl.arange(0, TILE))
        there, row = (token >= 0)[:, None], tl.maximum(token, 0).to(tl.int64)[:, None]
        rank, parts = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
        down = tl.multiple_of(tl.load(entry).to(tl.pointer_type(W)), 16)
        if (part < parts) & (tile * TILE_R < rank):
            r = tile * TILE_R + tl.arange(0, TILE_R)
            total = shrink(
                x + row * x_stride, there, down + (part * rank + r).to(tl.int64)[:, None] * inputs,
                (r < rank)[:, None], split * per_split, tl.minimum((split + 1) * per_split, inputs),
                DOT, TILE, TILE_R, TILE_K,
            )
            own = inner + row * (PARTS * SPLITS * RANKS) + (part * SPLITS + split) * RANKS + r[None, :]
            tl.store(own, total, mask=there & (r < rank)[None, :])
    if tl.program_id(0) == 0:
        wait(PDL)


@triton.jit
def shrink(
    x, there, rows, inside, start, end,
    DOT: tl.constexpr, TILE: tl.constexpr, TILE_R: tl.constexpr, TILE_K: tl.constexpr,
):
    """Multiply one group's tokens with some rows of `down`, over a share of the inputs."""
    total = tl.zeros([TILE, TILE_R], tl.float32)
    for first in range(start, end, TILE_K):
        k = (first + tl.arange(0, TILE_K))[None, :]
        a = tl.load(x + k, mask=there & (k < end), other=0.0)
        b = tl.load(rows + k, mask=inside & (k < end), other=0.0)
        total = tl.dot(a.to(DOT), tl.trans(b.to(DOT)), total, input_precision="ieee")
    return total


@triton.jit
def _sums(
    source, there, r, rank, RANKS: tl.constexpr, SPLITS: tl.constexpr
):
    """Return inner values of some ranks: the sum of what was shared out."""
    split = tl.arange(0, SPLITS)[None, :, None]
    own = source[:, :, None] + split * RANKS + r[None, None, :]
    mask = there[:, :, None] & (r < rank)[None, None, :]
    return tl.sum(tl.load(own, mask=mask, other=0.0, cache_modifier=".cg"), 1)


@triton.jit
def _raise(value, weights, total, W: tl.constexpr):
    """Add value @ weights to total; a sum of two numbers in bfloat16 has the inner value's bits, nearly."""
    if tl.bfloat16 == W:
        near = value.to(tl.bfloat16)
        total = tl.dot((value - near.to(tl.float32)).to(tl.bfloat16), weights, total)
        return tl.dot(near, weights, total)
    return tl.dot(value, weights.to(tl.float32), total, input_precision="ieee")


@triton.jit
def _place(bounds, tile, PARTS: tl.constexpr, TILE_N: tl.constexpr, ALIGNED: tl.constexpr):
    """Return part, first output and the part's end of a tile; tiles are counted part by part."""
    part, first, high, before = 0, 0, 0, 0
    for index in tl.static_range(PARTS):
        low, end = tl.load(bounds + index), tl.load(bounds + index + 1)
        if ALIGNED:
            low, end = tl.multiple_of(low, 16), tl.multiple_of(end, 16)
        is_here = tile >= before
        part, high = tl.where(is_here, index, part), tl.where(is_here, end, high)
        first = tl.where(is_here, low + (tile - before) * TILE_N, first)
        before += (end - low + TILE_N - 1) // TILE_N
    return part, first, high


@triton.jit(do_not_specialize=["num_blocks"])
def _expand_kernel(
    inner, out, groups, entries, bounds, bias, out_stride, outputs, num_blocks,
    ENTRY: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, W: tl.constexpr, SPLITS: tl.constexpr,
    BIASED: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    TILE_N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Add what the tokens of a group get of a block of outputs; what comes next is read meanwhile."""
    place = groups + tl.program_id(0) // num_blocks * (TILE + 1)
    slot = tl.load(place)
    if slot > 0:
        entry = entries + slot * ENTRY
        token = tl.load(place + 1 + tl.arange(0, TILE))
        there, row = (token >= 0)[:, None], tl.maximum(token, 0).to(tl.int64)[:, None]
        rank, parts = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
        up = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(W)), 16)
        factors, ends = tl.load(entry + 4), tl.load(entry + 5)
        part, first, high = _place(bounds, tl.program_id(0) % num_blocks, PARTS, BLOCK * TILE_N, ALIGNED)
        high = tl.where(rank > 0, high, 0)
        n, r = (first + tl.arange(0, TILE_N))[None, :], tl.arange(0, STEP)
        rows, target = up + r.to(tl.int64)[:, None] * outputs, out + row * out_stride
        weights = tl.load(rows + n, mask=(r < rank)[:, None] & (n < high), other=0.0)
        wait(PDL)
        release(PDL)
        source = inner + row * (PARTS * SPLITS * RANKS) + tl.where(parts > 1, part * SPLITS * RANKS, 0)
        value = _sums(source, there, r, rank, RANKS, SPLITS)
        old = tl.load(target + n, mask=there & (n < high), other=0.0)
        for tile in tl.range(1, BLOCK + 1, num_stages=1):
            later, end = n + TILE_N, tl.where(tile < BLOCK, high, 0)
            next_weights = tl.load(rows + later, mask=(r < rank)[:, None] & (later < end), other=0.0)
            next_old = tl.load(target + later, mask=there & (later < end), other=0.0)
            total = _raise(value, weights, tl.zeros([TILE, TILE_N], tl.float32), W)
            if RANKS > STEP:
                for start in tl.range(STEP, rank, STEP, num_stages=1):
                    further, own = r + start, rows + start * outputs.to(tl.int64) + n
                    weights = tl.load(own, mask=(further < rank)[:, None] & (n < high), other=0.0)
                    total = _raise(_sums(source, there, further, rank, RANKS, SPLITS), weights, total, W)
            total += old.to(tl.float32)
            if factors != 0:
                base = tl.zeros([1, TILE_N], tl.float32)
                if BIASED:
                    base = tl.load(bias + n, mask=n < high, other=0.0).to(tl.float32)
                factor = tl.load(factors.to(tl.pointer_type(tl.float32)) + n, mask=n < high, other=1.0)
                total = (total - base) * factor + base
            if ends != 0:
                total += tl.load(ends.to(tl.pointer_type(tl.float32)) + n, mask=n < high, other=0.0)
            tl.store(target + n, total.to(out.dtype.element_ty), mask=there & (n < high))
            n, weights, old = later, next_weights, next_old
    elif tl.program_id(0) == 0:
        wait(PDL)


@triton.jit
def _shrinking_gemv_kernel(
    x, weight, bias, out, N, groups, entries, inner,
    K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, BIASED: tl.constexpr,
    ENTRY: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr,
):
    """Multiply a single row as matmul's kernel does; to the first programs `down` is the matrix.

    They need no more registers than the others, of which as many run side by side as without them.
    """
    SHRINKS: tl.constexpr = (PARTS * RANKS + TILE_N - 1) // TILE_N
    program = tl.program_id(0)
    wait(PDL)
    if program < SHRINKS:
        entry = entries + tl.maximum(tl.load(groups), 0) * ENTRY
        down = tl.multiple_of(tl.load(entry).to(tl.pointer_type(W)), 16)
        ranks = (tl.load(entry + 2) * tl.load(entry + 3)).to(tl.int32)
        multiply_row(x, down, inner, inner, ranks, program, K, TILE_N, TILE_K, False, False, PDL)
    else:
        multiply_row(x, weight, bias, out, N, program - SHRINKS, K, TILE_N, TILE_K, BIASED, False, PDL)


@triton.jit
def _expand_row_kernel(
    out, groups, entries, bounds, bias, inner,
    N: tl.constexpr, TILE_N: tl.constexpr, STEP: tl.constexpr, BIASED: tl.constexpr,
    ENTRY: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr,
):
    """Add to a single row what was shrunk right before; all else is read beside the product."""
    part, first, high = _place(bounds, tl.program_id(0), PARTS, TILE_N, False)
    n, r = first + tl.arange(0, TILE_N), tl.arange(0, STEP)
    entry = entries + tl.maximum(tl.load(groups), 0) * ENTRY
    rank, parts = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
    rows = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(W)), 16) + n[None, :]
    factors, ends = tl.load(entry + 4), tl.load(entry + 5)
    inside = n < tl.where(rank > 0, high, 0)
    inner += tl.where(parts > 1, part, 0) * rank
    mask = (r < rank)[:, None] & inside[None, :]
    weights = tl.load(rows + r.to(tl.int64)[:, None] * N, mask=mask, other=0.0)
    wait(PDL)
    release(PDL)
    total = tl.load(out + n, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, rank, STEP):
        value = tl.load(inner + start + r, mask=start + r < rank, other=0.0)
        total += tl.sum(value[:, None] * weights.to(tl.float32), 0)
        further = start + STEP + r
        mask = (further < rank)[:, None] & inside[None, :]
        weights = tl.load(rows + further.to(tl.int64)[:, None] * N, mask=mask, other=0.0)
    if factors != 0:
        base = tl.zeros([TILE_N], tl.float32)
        if BIASED:
            base = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(factors.to(tl.pointer_type(tl.float32)) + n, mask=inside, other=1.0)
        total = (total - base) * factor + base
    if ends != 0:
        total += tl.load(ends.to(tl.pointer_type(tl.float32)) + n, mask=inside, other=0.0)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=inside)
# fmt: on


def group(slots: Tensor, num_slots: int) -> Tensor:
    """See adapters.Group: a row for each group, its slot and 16 tokens; -1 = none."""
    window = _WINDOW if len(slots) <= _WINDOW else 2 * _WINDOW
    windows, of_window = cdiv(len(slots), window), min(window, window // GROUP + num_slots - 1)
    if windows == 1:
        of_window = min(of_window, len(slots))
    groups = torch.full((windows * of_window, GROUP + 1), -1, dtype=torch.int32, device=slots.device)
    if windows:
        _group_kernel[(windows,)](
            slots, groups, len(slots), of_window, WINDOW=window, TILE=GROUP, num_warps=window // 16
        )
    return groups


def expand(
    inner: Tensor,
    out: Tensor,
    groups: Tensor,
    table: LowRankTable,
    bias: Tensor | None,
    splits: int,
    how: dict[str, Any],
) -> None:
    """Add to `out` what inner values are expanded to."""
    tile_n, block, num_warps = _EXPAND_FEW if len(out) <= _FEW_TOKENS else _EXPAND
    step = max(16, min(64, 512 // splits, power_of_2(table.most_rank)))
    tile_n = 128 if table.dtype == torch.float32 or step > 16 else tile_n
    blocks = sum(cdiv(end - begin, tile_n * block) for begin, end in pairwise(table.kept_bounds))
    is_aligned = not any(bound % 16 for bound in table.kept_bounds)
    kind = _kind_of(table, splits) | {"BIASED": bias is not None, "ALIGNED": is_aligned, "STEP": step}
    kind |= {"TILE_N": tile_n, "BLOCK": block, "num_warps": num_warps}
    tensors = inner, out, groups, table.entries, table.bounds, out if bias is None else bias
    sizes = out.stride(0), table.num_outputs, blocks
    _expand_kernel[(len(groups) * blocks,)](*tensors, *sizes, **kind, **how)


def _kind_of(table: LowRankTable, splits: int) -> dict[str, Any]:
    kind = {"ENTRY": ENTRY, "PARTS": len(table.kept_bounds) - 1, "RANKS": table.most_rank}
    return kind | {"W": TYPES[table.dtype], "SPLITS": splits, "TILE": GROUP}


class LowRankChanges:
    """The op `add_low_rank`, with memory of its own: the product may still be using what torch gives out."""

    def __init__(self) -> None:
        self._inner: dict[tuple[torch.device, int], Tensor] = {}

    def __call__(
        self, x: Tensor, out: Tensor, groups: Tensor, table: LowRankTable, bias: Tensor | None
    ) -> None:
        """See adapters.AddLowRank."""
        if not len(groups):
            return
        how = overlapped() if len(x) <= _FEW_TOKENS else {"PDL": False}
        inner = self.shrink(x, groups, table, how)
        expand(inner, out, groups, table, bias, shares_of_inputs(x.shape[1]), how)

    def shrink(self, x: Tensor, groups: Tensor, table: LowRankTable, how: dict[str, Any]) -> Tensor:
        """Return inner values of all tokens, by parts and shares of the inputs: [T, parts, shares, rank]."""
        (tokens, inputs), parts = x.shape, len(table.kept_bounds) - 1
        dot = x.dtype if x.dtype == table.dtype else torch.float32
        tile_r, (tile_k, num_stages, num_warps) = 16 if table.most_rank <= 16 else 32, _SHRINK
        tile_k = 32 if dot == torch.float32 else tile_k
        splits, width = shares_of_inputs(inputs), parts * table.most_rank
        if tokens <= _FEW_TOKENS:
            inner = self._kept(x.device, splits * _FEW_TOKENS * width)
        else:
            inner = torch.empty(splits * tokens * width, dtype=torch.float32, device=x.device)
        per_split = cdiv(cdiv(inputs, splits), tile_k) * tile_k
        kind = _kind_of(table, splits) | {"DOT": TYPES[dot], "TILE_R": tile_r, "TILE_K": tile_k}
        kind["num_stages"] = stages(num_stages, (GROUP + tile_r) * tile_k * dot.itemsize)
        tensors, sizes = (x, inner, groups, table.entries), (x.stride(0), inputs, per_split)
        programs = len(groups) * parts * cdiv(table.most_rank, tile_r) * splits
        _shrink_kernel[(programs,)](*tensors, *sizes, num_warps=num_warps, **kind, **how)
        return inner

    def multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: Tensor, table: LowRankTable
    ) -> Tensor | None:
        """See adapters.MultiplyChanged: of a single row, which the product's first programs shrink."""
        (tokens, inputs), outputs, parts = x.shape, table.num_outputs, len(table.kept_bounds) - 1
        if tokens != 1 or x.dtype not in NARROW:
            return None
        out, inner = x.new_empty((1, outputs)), self._kept(x.device, parts * table.most_rank)
        held = out if bias is None else bias
        kind = {"BIASED": bias is not None, "ENTRY": ENTRY, "PARTS": parts, "W": TYPES[table.dtype]}
        sizes = {"K": inputs, "TILE_N": 2, "TILE_K": min(1024, power_of_2(inputs)), "RANKS": table.most_rank}
        programs = cdiv(parts * table.most_rank, 2) + cdiv(outputs, 2)
        tensors = x, weight, held, out, outputs, groups, table.entries, inner
        _shrinking_gemv_kernel[(programs,)](*tensors, num_warps=4, **sizes, **kind, **overlapped())
        sizes = {"N": outputs, "TILE_N": _TILE_ROW, "STEP": GROUP}
        tiles = sum(cdiv(end - begin, _TILE_ROW) for begin, end in pairwise(table.kept_bounds))
        rest = out, groups, table.entries, table.bounds, held, inner
        _expand_row_kernel[(tiles,)](*rest, num_warps=4, **sizes, **kind, **overlapped())
        return out

    def _kept(self, device: torch.device, size: int) -> Tensor:
        """Return room for inner values at an address that captured steps may keep."""
        if (device, size) not in self._inner:
            self._inner[device, size] = torch.empty(size, dtype=torch.float32, device=device)
        return self._inner[device, size]
