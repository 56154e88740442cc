"""Low-rank changes of products: tokens grouped by adapter, then shrink (x down^T) and expand (inner up).

`group` is launched once a step. Grids depend on the number of tokens and on the table's largest rank alone:
a captured step serves whatever adapters come later, and programs without work return at once. A token's sums
have an order of their own: its company changes no bit. The inner values are kept in float32.

Both kernels begin early (see `launch`): the product that is changed was launched last, so its inputs, the
groups and the adapters are there already, and only what it writes or reads itself is waited for.
"""

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.adapters import ENTRY, LowRankTable, shares_of_inputs
from octavo.runtime.kernels.triton.launch import cdiv, overlapped, release, wait

_TILE = 16  # tokens of one adapter, whose matrices are read once for them
_WINDOW = 128  # tokens among which groups are looked for
_FEW_TOKENS = 256
_FEW_GROUPS = 32  # of more, programs that wait take the place of programs that work
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


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


@triton.jit(do_not_specialize=["split_stride"])
def _shrink_kernel(
    x, groups, entries, inner, x_stride, split_stride, inputs, per_split,
    ENTRY: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, W: tl.constexpr, DOT: tl.constexpr,
    TILE: tl.constexpr, TILE_R: tl.constexpr, TILE_K: tl.constexpr, PDL: tl.constexpr,
):
    """Multiply one group's tokens with some rows of `down`, over a share of the inputs."""
    BLOCKS: tl.constexpr = (RANKS + TILE_R - 1) // TILE_R
    place = groups + tl.program_id(0) * (TILE + 1)
    part, block, split = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS, tl.program_id(2)
    slot = tl.maximum(tl.load(place), 0)
    entry = entries + slot * ENTRY
    rank, parts = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3)
    if (slot == 0) | (part >= parts) | (block * TILE_R >= rank):
        wait(PDL)
        return
    down = tl.multiple_of(tl.load(entry).to(tl.pointer_type(W)), 16)
    token = tl.load(place + 1 + tl.arange(0, TILE))
    there, row = (token >= 0)[:, None], tl.maximum(token, 0).to(tl.int64)[:, None]
    r = block * TILE_R + tl.arange(0, TILE_R)
    rows = down + (part * rank + r).to(tl.int64)[:, None] * inputs
    total = tl.zeros([TILE, TILE_R], tl.float32)
    end = tl.minimum((split + 1) * per_split, inputs)
    for start in range(split * per_split, end, TILE_K):
        k = (start + tl.arange(0, TILE_K))[None, :]
        a = tl.load(x + row * x_stride + k, mask=there & (k < end), other=0.0)
        b = tl.load(rows + k, mask=(r < rank)[:, None] & (k < end), other=0.0)
        total = tl.dot(a.to(DOT), tl.trans(b.to(DOT)), total, input_precision="ieee")
    wait(PDL)
    release(PDL)
    target = inner + split.to(tl.int64) * split_stride + row * (PARTS * RANKS) + part * RANKS + r[None, :]
    tl.store(target, total, mask=there & (r < rank)[None, :])


@triton.jit(do_not_specialize=["split_stride"])
def _expand_kernel(
    inner, out, groups, entries, bounds, bias, out_stride, split_stride, outputs,
    ENTRY: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, W: tl.constexpr, SPLITS: tl.constexpr,
    BIASED: tl.constexpr, TILE: tl.constexpr, TILE_R: tl.constexpr, TILE_N: tl.constexpr, PDL: tl.constexpr,
):
    """Add what one group's tokens get of some outputs of one part; then factors and biases."""
    place = groups + tl.program_id(0) * (TILE + 1)
    slot = tl.maximum(tl.load(place), 0)
    entry = entries + slot * ENTRY
    rank, parts = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3)
    if (slot == 0) | (rank == 0):
        wait(PDL)
        return
    block, first, part, begin, end = tl.program_id(1), 0, 0, 0, 0
    for p in tl.static_range(PARTS):  # blocks are counted part by part
        low, high = tl.load(bounds + p), tl.load(bounds + p + 1)
        count = (high - low + TILE_N - 1) // TILE_N
        is_own = (block >= first) & (block < first + count)
        part, end = tl.where(is_own, p, part), tl.where(is_own, high, end)
        begin = tl.where(is_own, low + (block - first) * TILE_N, begin)
        first += count
    up = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(W)), 16)
    token = tl.load(place + 1 + tl.arange(0, TILE))
    there, row = (token >= 0)[:, None], tl.maximum(token, 0).to(tl.int64)[:, None]
    n = begin + tl.arange(0, TILE_N)
    inside = n < end
    source = inner + row * (PARTS * RANKS) + tl.where(parts > 1, part * RANKS, 0)
    target, mask = out + row * out_stride + n[None, :], there & inside[None, :]
    old = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros([TILE, TILE_N], tl.float32)
    columns = up + tl.arange(0, TILE_R).to(tl.int64)[:, None] * outputs + n[None, :]
    following = tl.load(columns, mask=(tl.arange(0, TILE_R) < rank)[:, None] & inside[None, :], other=0.0)
    wait(PDL)
    release(PDL)
    for start in range(0, rank, TILE_R):
        r = start + tl.arange(0, TILE_R)
        weights = following
        columns += TILE_R * outputs.to(tl.int64)
        following = tl.load(columns, mask=(r + TILE_R < rank)[:, None] & inside[None, :], other=0.0)
        value = tl.zeros([TILE, TILE_R], tl.float32)
        for split in tl.static_range(SPLITS):
            own = source + tl.cast(split, tl.int64) * split_stride + r[None, :]
            value += tl.load(own, mask=there & (r < rank)[None, :], other=0.0)
        if tl.bfloat16 == W:  # a sum of two of them has the inner value's bits, nearly
            near = value.to(tl.bfloat16)
            total = tl.dot((value - near.to(tl.float32)).to(tl.bfloat16), weights, total)
            total = tl.dot(near, weights, total)
        else:
            total = tl.dot(value, weights.to(tl.float32), total, input_precision="ieee")
    total += old
    factors, ends = tl.load(entry + 4), tl.load(entry + 5)
    if factors != 0:
        base = tl.zeros([TILE_N], tl.float32)
        if BIASED:
            base = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(factors.to(tl.pointer_type(tl.float32)) + n, mask=inside, other=1.0)
        total = (total - base[None, :]) * factor[None, :] + base[None, :]
    if ends != 0:
        total += tl.load(ends.to(tl.pointer_type(tl.float32)) + n, mask=inside, other=0.0)[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)
# fmt: on


def group(slots: Tensor, num_slots: int) -> Tensor:
    """See adapters.Group: a row for each group, its slot and 16 tokens; -1 = none."""
    windows, of_window = cdiv(len(slots), _WINDOW), min(_WINDOW, _WINDOW // _TILE + num_slots - 1)
    if windows == 1:
        of_window = min(of_window, len(slots))
    groups = torch.full((windows * of_window, _TILE + 1), -1, dtype=torch.int32, device=slots.device)
    if windows:
        _group_kernel[(windows,)](
            slots, groups, len(slots), of_window, WINDOW=_WINDOW, TILE=_TILE, num_warps=8
        )
    return groups


def add_low_rank(x: Tensor, out: Tensor, groups: Tensor, table: LowRankTable, bias: Tensor | None) -> None:
    """See adapters.AddLowRank."""
    (tokens, inputs), ranks, parts = x.shape, table.most_rank, len(table.kept_bounds) - 1
    if not len(groups):
        return
    splits = shares_of_inputs(inputs)
    early = overlapped() if len(groups) <= _FEW_GROUPS else {"PDL": False}
    inner = torch.empty((splits, tokens, parts * ranks), dtype=torch.float32, device=x.device)
    dot = x.dtype if x.dtype == table.dtype else torch.float32
    tile_r, tile_k = 16 if ranks <= 16 else 32, 32 if dot == torch.float32 else 128
    sizes = {"ENTRY": ENTRY, "PARTS": parts, "RANKS": ranks, "W": _TYPES[table.dtype], "TILE": _TILE}
    _shrink_kernel[(len(groups), parts * cdiv(ranks, tile_r), splits)](
        x,
        groups,
        table.entries,
        inner,
        x.stride(0),
        inner.stride(0),
        inputs,
        cdiv(cdiv(inputs, splits), tile_k) * tile_k,
        DOT=_TYPES[dot],
        TILE_R=tile_r,
        TILE_K=tile_k,
        num_stages=4,
        **sizes,
        **early,
    )
    tile_n = 128 if tokens <= _FEW_TOKENS or table.dtype == torch.float32 else 256
    bounds = table.kept_bounds
    blocks = sum(cdiv(end - begin, tile_n) for begin, end in pairwise(bounds))
    _expand_kernel[(len(groups), blocks)](
        inner,
        out,
        groups,
        table.entries,
        table.bounds,
        out if bias is None else bias,
        out.stride(0),
        inner.stride(0),
        table.num_outputs,
        SPLITS=splits,
        BIASED=bias is not None,
        TILE_R=16,
        TILE_N=tile_n,
        **sizes,
        **early,
    )
