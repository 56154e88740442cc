"""Decode attention cut over the keys (split-KV): which part a program has, and how the last one joins them.

The shapes decide into how many parts at most, the request's length, which only the kernel knows, into how
many. So no launch depends on a length, and one captured graph serves any context. Parts that ranks have are
joined in the same way.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.triton.launch import is_last, power_of_2
from octavo.runtime.kernels.triton.online_softmax import log_of_sum


@triton.jit
def _merge_kernel(
    parts, log_sums, sinks, out, part_rank, part_token, part_head, sum_rank, sum_token, sum_head,
    D: tl.constexpr, D_PAD: tl.constexpr, RANKS: tl.constexpr, RANKS_PAD: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rank, d = tl.arange(0, RANKS_PAD), tl.arange(0, D_PAD)
    there, inside = rank < RANKS, d < D
    place = rank * sum_rank + token * sum_token + head * sum_head
    seen = tl.load(log_sums + place, mask=there, other=float("-inf"))
    highest = tl.max(seen, 0)
    if SINKS:
        sink = tl.load(sinks + head)
        highest = tl.maximum(highest, sink)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(seen - highest)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp(sink - highest)
    source = parts + rank * part_rank + token * part_token + head * part_head
    values = tl.load(source[:, None] + d[None, :], mask=there[:, None] & inside[None, :], other=0.0)
    merged = tl.sum(values.to(tl.float32) * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    target = out + (token * tl.num_programs(1) + head) * D + d
    tl.store(target, merged.to(out.dtype.element_ty), mask=inside)


def merge_parts(parts: Tensor, log_sums: Tensor, sinks: Tensor | None) -> Tensor:
    """See attention.MergeParts."""
    ranks, *sizes = parts.shape
    out = parts.new_empty(sizes)
    given = parts, log_sums, out if sinks is None else sinks, out
    widths = {"D": sizes[2], "D_PAD": power_of_2(sizes[2]), "RANKS": ranks, "RANKS_PAD": power_of_2(ranks)}
    _merge_kernel[tuple(sizes[:2])](
        *given, *parts.stride()[:3], *log_sums.stride(), SINKS=sinks is not None, **widths, num_warps=1
    )
    return out


@triton.jit
def part_size(num_keys, most, TILE_K: tl.constexpr, MIN_KEYS: tl.constexpr):
    """Return the keys of a part, of `most` at most; the last one may have fewer."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, most), TILE_K) * TILE_K, MIN_KEYS)


@triton.jit
def own_split(first_key, kv_len, TILE_K: tl.constexpr, MIN_KEYS: tl.constexpr):
    """Return (this program's first key, the end of its keys, how many parts have any)."""
    part = tl.program_id(2)
    size = part_size(kv_len - first_key, tl.num_programs(2), TILE_K, MIN_KEYS)
    num_splits = tl.cdiv(kv_len - first_key, size)
    first_key += part * size
    return first_key, tl.minimum(first_key + size, kv_len), num_splits


# fmt: off
@triton.jit
def _join(
    partial, log_sums, out, told, place, num_splits,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, MAX_SPLITS: tl.constexpr, HEADS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Join the parts of GROUP heads from `place` on, weighted by what each saw, HEADS at a time."""
    part, d = tl.arange(0, MAX_SPLITS), tl.arange(0, D_PAD)
    for first in range(0, GROUP, HEADS):
        head = first + tl.arange(0, HEADS)
        there = (part < num_splits)[:, None] & (head < GROUP)[None, :]
        source = (place + head)[None, :] * MAX_SPLITS + part[:, None]
        seen = tl.load(log_sums + source, mask=there, other=float("-inf"), cache_modifier=".cg")
        inside = there[:, :, None] & (d < D)[None, None, :]
        values = tl.load(
            partial + source[:, :, None] * D + d[None, None, :], mask=inside, other=0.0, cache_modifier=".cg"
        )
        highest = tl.max(seen, 0)
        weights = tl.exp2(seen - tl.where(highest == float("-inf"), 0.0, highest)[None, :])
        joined = tl.sum(values * weights[:, :, None], 0) / tl.sum(weights, 0)[:, None]
        target = out + (place + head)[:, None] * D + d[None, :]
        tl.store(target, joined.to(out.dtype.element_ty), mask=(head < GROUP)[:, None] & (d < D)[None, :])
        if SHARED:
            tl.store(told + place + head, log_of_sum(highest, tl.sum(weights, 0)), mask=head < GROUP)


@triton.jit
def finish(
    maxima, sums, total, num_splits, out, partial, log_sums, counters, told,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    ROWS: tl.constexpr, MAX_SPLITS: tl.constexpr, HEADS: tl.constexpr, SHARED: tl.constexpr,
):
    """Store the result of the only part, or this part's; the last one to be done joins them.

    maxima, sums: [ROWS] of the heads of a group, and what is no head. total: [ROWS, D_PAD].
    """
    head, request, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    row, d = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    inside = (row < GROUP)[:, None] & (d < D)[None, :]
    total *= (1.0 / tl.where(sums == 0.0, 1.0, sums))[:, None]
    pair = request * NUM_KV_HEADS + head
    place = pair * GROUP + row
    if num_splits <= 1:
        tl.store(out + place[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=inside)
        if SHARED:
            tl.store(told + place, log_of_sum(maxima, sums), mask=row < GROUP)
        return
    place = place * MAX_SPLITS + part
    tl.store(partial + place[:, None] * D + d[None, :], total, mask=inside)
    tl.store(log_sums + place, maxima + tl.log2(sums), mask=row < GROUP)
    if is_last(counters + pair, num_splits):
        _join(
            partial, log_sums, out, told, pair * GROUP, num_splits,
            GROUP, D, D_PAD, MAX_SPLITS, HEADS, SHARED,
        )
# fmt: on
