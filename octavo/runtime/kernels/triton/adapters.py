"""Low-rank changes of products: tokens grouped by adapter, then shrink (x down^T) and expand (inner up).

`group` is launched once a step. Grids depend on the number of tokens and on the table's largest rank alone:
a captured step serves whatever adapters come later, and programs without work return at once. A token's sums
have an order of their own: its company changes no bit. The inner values are kept in float32.

One kernel shrinks and expands. Of few tokens it begins early (see `launch`), beside the product that it
changes, which was launched last: the product's inputs, the groups and the adapters are there already, and
only `out` is waited for. Programs start in the order of their numbers, so those that wait for others to
shrink cannot keep these from starting. (Products of few rows that add their changes themselves, shrunk by
a kernel before them, were slower on an H100: of 64 rows and 16 adapters a layer took 245 µs instead of 206.)

A single row is shrunk by the first programs of its product, whose blocks leave no others room beside them; a
second kernel expands: a layer took 159 µs instead of 178, without adapters 150.
"""

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.adapters import ENTRY, LowRankTable, shares_of_inputs
from octavo.runtime.kernels.triton.launch import (
    Counters,
    cdiv,
    fits,
    is_last,
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
_PROGRAMS = 4 * 132
_REGISTERS = 128  # of a thread: four programs of a multiprocessor at a time
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


@triton.jit(do_not_specialize=["num_groups", "num_blocks", "per_block"])
def _change_kernel(
    x, out, inner, counters, groups, entries, bounds, bias,
    x_stride, out_stride, inputs, outputs, per_split, num_groups, num_blocks, per_block,
    ENTRY: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, W: tl.constexpr, DOT: tl.constexpr,
    SPLITS: tl.constexpr, BIASED: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    TILE_R: tl.constexpr, TILE_K: tl.constexpr, TILE_N: tl.constexpr, PDL: tl.constexpr,
):
    """Shrink in the first programs; the others expand, once those of their group have counted themselves."""
    RANK_TILES: tl.constexpr = (RANKS + TILE_R - 1) // TILE_R
    SHRINKS: tl.constexpr = PARTS * RANK_TILES * SPLITS
    program = tl.program_id(0)
    later = program - num_groups * SHRINKS
    group = tl.where(later < 0, program // SHRINKS, later // num_blocks)
    place = groups + group * (TILE + 1)
    slot = tl.maximum(tl.load(place), 0)
    entry = entries + slot * ENTRY
    rank, parts = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
    token = tl.load(place + 1 + tl.arange(0, TILE))
    there, row = (token >= 0)[:, None], tl.maximum(token, 0).to(tl.int64)[:, None]
    inner += row * (PARTS * SPLITS * RANKS)  # sums of shares of the inputs lie side by side
    if later < 0:
        task = program % SHRINKS
        part, tile, split = task // (RANK_TILES * SPLITS), task // SPLITS % RANK_TILES, task % SPLITS
        if (slot > 0) & (part < parts) & (tile * TILE_R < rank):
            down = tl.multiple_of(tl.load(entry).to(tl.pointer_type(W)), 16)
            r = tile * TILE_R + tl.arange(0, TILE_R)
            total = shrink(
                x + row * x_stride, there, down + (part * rank + r).to(tl.int64)[:, None] * inputs,
                (r < rank)[:, None], split * per_split, tl.minimum((split + 1) * per_split, inputs),
                DOT, TILE, TILE_R, TILE_K,
            )
            own = inner + (part * SPLITS + split) * RANKS + r[None, :]
            tl.store(own, total, mask=there & (r < rank)[None, :])
            tl.debug_barrier()
            tl.atomic_add(counters + group, 1, sem="release")
    elif (slot == 0) | (rank == 0):
        wait(PDL)
    else:
        _expand(
            inner, out + row * out_stride, there, counters + group, entry, rank, parts, bounds, bias,
            later % num_blocks * per_block, per_block,
            SPLITS * parts * ((rank + TILE_R - 1) // TILE_R), outputs,
            PARTS, RANKS, W, SPLITS, BIASED, ALIGNED, TILE, STEP, TILE_N, PDL,
        )
        if is_last(counters + num_groups + group, num_blocks):
            tl.store(counters + group, 0)


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
    source, there, r, rank, RANKS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):
    """Return inner values of some ranks: the sum of what was shared out."""
    value = tl.zeros([TILE, STEP], tl.float32)
    for split in tl.static_range(SPLITS):
        own = source + split * RANKS + r[None, :]
        value += tl.load(own, mask=there & (r < rank)[None, :], other=0.0, cache_modifier=".cg")
    return value


@triton.jit
def _raise(value, weights, total, W: tl.constexpr):
    """Add value @ weights to total; a sum of two numbers in bfloat16 has the inner value's bits, nearly."""
    if tl.bfloat16 == W:
        near = value.to(tl.bfloat16)
        total = tl.dot((value - near.to(tl.float32)).to(tl.bfloat16), weights, total)
        return tl.dot(near, weights, total)
    return tl.dot(value, weights.to(tl.float32), total, input_precision="ieee")


@triton.jit
def _expand(
    inner, out, there, counter, entry, rank, parts, bounds, bias, first, count, num_shrunk, outputs,
    PARTS: tl.constexpr, RANKS: tl.constexpr, W: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, TILE_N: tl.constexpr, PDL: tl.constexpr,
):
    """Add what one group's tokens get of `count` tiles of outputs; then factors and biases."""
    up = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(W)), 16)
    factors, ends = tl.load(entry + 4), tl.load(entry + 5)
    r = tl.arange(0, STEP)
    rows = up + r.to(tl.int64)[:, None] * outputs
    while tl.atomic_add(counter, 0, sem="acquire") < num_shrunk:
        pass
    before = 0
    is_first = True
    for part in tl.static_range(PARTS):  # tiles are counted part by part
        low, high = tl.load(bounds + part), tl.load(bounds + part + 1)
        if ALIGNED:
            low, high = tl.multiple_of(low, 16), tl.multiple_of(high, 16)
        tiles = (high - low + TILE_N - 1) // TILE_N
        source = inner + tl.where(parts > 1, part * SPLITS * RANKS, 0)
        start, end = tl.maximum(first - before, 0), tl.minimum(first + count - before, tiles)
        before += tiles
        if start < end:
            value = _sums(source, there, r, rank, RANKS, SPLITS, TILE, STEP)
            if is_first:
                wait(PDL)
                release(PDL)
                is_first = False
            for tile in range(start, end):
                n = low + tile * TILE_N + tl.arange(0, TILE_N)
                inside = n < high
                weights = tl.load(rows + n[None, :], mask=(r < rank)[:, None] & inside[None, :], other=0.0)
                target, mask = out + n[None, :], there & inside[None, :]
                old = tl.load(target, mask=mask, other=0.0)
                total = _raise(value, weights, tl.zeros([TILE, TILE_N], tl.float32), W)
                if RANKS > STEP:
                    for next_rank in tl.range(STEP, rank, STEP, num_stages=1):
                        further, own = r + next_rank, rows + next_rank * outputs.to(tl.int64) + n[None, :]
                        weights = tl.load(own, mask=(further < rank)[:, None] & inside[None, :], other=0.0)
                        more = _sums(source, there, further, rank, RANKS, SPLITS, TILE, STEP)
                        total = _raise(more, weights, total, W)
                total += old.to(tl.float32)
                if factors != 0:
                    base = tl.zeros([TILE_N], tl.float32)
                    if BIASED:
                        base = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
                    factor = tl.load(factors.to(tl.pointer_type(tl.float32)) + n, mask=inside, other=1.0)
                    total = (total - base[None, :]) * factor[None, :] + base[None, :]
                if ends != 0:
                    addend = ends.to(tl.pointer_type(tl.float32)) + n
                    total += tl.load(addend, mask=inside, other=0.0)[None, :]
                tl.store(target, total.to(out.dtype.element_ty), mask=mask)
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
    program, part, first, high, before = tl.program_id(0), 0, 0, 0, 0
    for index in tl.static_range(PARTS):  # tiles are counted part by part
        low, end = tl.load(bounds + index), tl.load(bounds + index + 1)
        is_here = program >= before
        part, high = tl.where(is_here, index, part), tl.where(is_here, end, high)
        first = tl.where(is_here, low + (program - before) * TILE_N, first)
        before += (end - low + TILE_N - 1) // TILE_N
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


class LowRankChanges:
    """The op `add_low_rank`, with memory of its own: the product may still be using what torch gives out."""

    def __init__(self) -> None:
        self._counters = Counters()
        self._inner: dict[tuple[torch.device, int], Tensor] = {}

    def __call__(
        self, x: Tensor, out: Tensor, groups: Tensor, table: LowRankTable, bias: Tensor | None
    ) -> None:
        """See adapters.AddLowRank."""
        (tokens, inputs), parts, num_groups = x.shape, len(table.kept_bounds) - 1, len(groups)
        if not num_groups:
            return
        dot = x.dtype if x.dtype == table.dtype else torch.float32
        tile_r, tile_k = 16 if table.most_rank <= 16 else 32, 32 if dot == torch.float32 else 128
        is_few = tokens <= _FEW_TOKENS
        step = max(16, min(64, power_of_2(table.most_rank)))
        is_wide = not is_few and table.dtype != torch.float32
        row = (step + GROUP) * table.dtype.itemsize  # of a stage: a column of `up` and of `out`
        tile_n = 256 if is_wide and fits(3, 256 * row, 1280 * GROUP) else 128
        splits, width = shares_of_inputs(inputs), parts * table.most_rank
        tiles = sum(cdiv(end - begin, tile_n) for begin, end in pairwise(table.kept_bounds))
        per_block = max(1, min(8, num_groups * tiles // _PROGRAMS))
        blocks = cdiv(tiles, per_block)
        how = overlapped() if is_few else {"PDL": False}
        if is_few:
            inner = self._kept(x.device, splits * _FEW_TOKENS * width)
            counters = self._counters.on(x.device, 2 * num_groups)
        else:
            inner = torch.empty(splits * tokens * width, dtype=torch.float32, device=x.device)
            counters = torch.zeros(2 * num_groups, dtype=torch.int32, device=x.device)
        how = how | ({"maxnreg": _REGISTERS} if how["PDL"] else {})
        shrinks = parts * cdiv(table.most_rank, tile_r) * splits
        tensors = x, out, inner, counters, groups, table.entries, table.bounds, out if bias is None else bias
        strides, per_split = (x.stride(0), out.stride(0)), cdiv(cdiv(inputs, splits), tile_k) * tile_k
        sizes = *strides, inputs, table.num_outputs, per_split, num_groups, blocks, per_block
        is_aligned = not any(bound % 16 for bound in table.kept_bounds)
        kind = {"ENTRY": ENTRY, "PARTS": parts, "RANKS": table.most_rank, "W": TYPES[table.dtype]}
        kind |= {"DOT": TYPES[dot], "SPLITS": splits, "BIASED": bias is not None, "ALIGNED": is_aligned}
        tile = {"TILE": GROUP, "STEP": step, "TILE_R": tile_r, "TILE_K": tile_k, "TILE_N": tile_n}
        tile["num_stages"] = stages(3, tile_n * row, 5 * tile_n * GROUP)
        _change_kernel[(num_groups * (shrinks + blocks),)](*tensors, *sizes, **kind, **tile, **how)

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
