"""Attention over the paged cache: one kernel for requests with one new token, one for all others.

Both follow FlashAttention-2 (https://arxiv.org/abs/2307.08691): a program keeps a tile of queries and walks
over the keys they see with a running softmax. All query heads of one key head share the tile: row m is query
m // GROUP of the tile and head m % GROUP of the group, so a decoding request, too, fills a tensor core.

Decoding is cut over the keys where few requests run (see `split_keys`); where many do, tiles are copied
whole (see `swap_ab`). Programs begin in the order of the requests, so it pays that the longest come first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.attention import Ragged, Scores, Share
from octavo.runtime.kernels.triton.both_sides import attend_to_both_sides
from octavo.runtime.kernels.triton.latent import attend_to_latents
from octavo.runtime.kernels.triton.launch import Counters, overlapped, power_of_2, release, wait
from octavo.runtime.kernels.triton.online_softmax import (
    attend,
    begin_rows,
    locate,
    log_of_sum,
    look_up,
    own_bounds,
)
from octavo.runtime.kernels.triton.shared_prefix import attend_shared_prefix
from octavo.runtime.kernels.triton.split_keys import finish, own_split
from octavo.runtime.kernels.triton.swap_ab import describe, swap_ab_kernel
from octavo.runtime.kernels.triton.tiles import Call, Shapes, decode_tiles, prefill_tiles, split

_LOG2_E = 1.4426950408889634
_JOINED_AT_ONCE = 1 << 13  # values of partial results that a joining program holds


# fmt: off
@triton.jit(
    do_not_specialize=["num_requests", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "cu_q_lens", "kv_lens", "num_seen", "told"],
)
def _prefill_kernel(
    q, cache, block_tables, cu_q_lens, kv_lens, out,
    stride_q, stride_table, num_requests, scale, soft_cap, sinks, num_seen, told,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):
    TILE_Q: tl.constexpr = TILE_M // GROUP
    head = tl.program_id(1)
    request, begin, q_len, first_q = locate(cu_q_lens, tl.program_id(0), num_requests, TILE_Q)
    kv_len = tl.load(kv_lens + request)
    wait(PDL)
    if first_q >= q_len:
        return
    first_position = kv_len - q_len + first_q
    end_key = tl.minimum(first_position + TILE_Q, kv_len)
    if SHARED:
        first_position, end_key = own_bounds(num_seen + begin, first_q, q_len, TILE_Q)
    oldest = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    first_key = oldest // TILE_K * TILE_K

    row, d = tl.arange(0, TILE_M), tl.arange(0, D_PAD)
    index = first_q + row // GROUP
    position = kv_len - q_len + index
    real = (row < TILE_Q * GROUP) & (index < q_len)
    if SHARED:
        position = tl.load(num_seen + begin + index, mask=real, other=0) - 1
    inside = real[:, None] & (d[None, :] < D)
    token, column = (begin + index).to(tl.int64), head * GROUP + row % GROUP
    source = q + (token * stride_q + column * D)[:, None] + d[None, :]
    query = tl.load(source, mask=inside, other=0.0).to(DOT)
    maxima, sums = begin_rows(sinks, column, real, TILE_M, SINKS)
    state = maxima, sums, tl.zeros([TILE_M, D_PAD], tl.float32)
    keys = cache + head * D
    values = keys + BLOCK_SIZE * NUM_KV_HEADS * D
    table = block_tables + request.to(tl.int64) * stride_table
    next_blocks = look_up(table, first_key, end_key, BLOCK_SIZE, TILE_K)
    whole_end = first_key
    if WINDOW == 0:  # whole tiles of keys that all queries see need no mask
        whole = tl.minimum(first_position + 1, end_key) - first_key
        whole_end += tl.maximum(whole // TILE_K * TILE_K, 0)
    maxima, sums, total = attend(
        state, next_blocks, query, position, first_key, whole_end, end_key, oldest, keys, values,
        table, NUM_KV_HEADS * D, scale, soft_cap, D, D_PAD, BLOCK_SIZE, TILE_K, WINDOW, CAPPED, DOT,
    )
    release(PDL)
    total = total / tl.where(sums == 0.0, 1.0, sums)[:, None]
    place = token * (NUM_KV_HEADS * GROUP) + column
    tl.store(out + place[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=inside)
    if SHARED:
        tl.store(told + place, log_of_sum(maxima, sums), mask=real)


@triton.jit(
    do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["block_tables", "kv_lens"]
)
def _decode_kernel(
    q, cache, block_tables, kv_lens, out, partial, log_sums, counters,
    stride_q, stride_table, scale, soft_cap, sinks, num_seen, told,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
    MAX_SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr, HEADS: tl.constexpr,
):
    """Attend to one part of the keys of a request's key head. A request without keys is padding: zeros."""
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kv_len = tl.load(kv_lens + request)
    oldest = tl.maximum(kv_len - WINDOW, 0) if WINDOW > 0 else 0
    first_key, end_key, num_splits = own_split(oldest // TILE_K * TILE_K, kv_len, TILE_K, MIN_KEYS)
    table = block_tables + request * stride_table
    next_blocks = look_up(table, first_key, end_key, BLOCK_SIZE, TILE_K)
    wait(PDL)
    if tl.program_id(2) >= tl.maximum(num_splits, 1):
        return

    row, d = tl.arange(0, TILE_M), tl.arange(0, D_PAD)
    inside = (row < GROUP)[:, None] & (d < D)[None, :]
    source = q + request * stride_q + ((head * GROUP + row) * D)[:, None] + d[None, :]
    query = tl.load(source, mask=inside, other=0.0).to(DOT)
    seen = (row < GROUP) & (tl.program_id(2) == 0)
    maxima, sums = begin_rows(sinks, head * GROUP + row, seen, TILE_M, SINKS)
    keys = cache + head * D
    values = keys + BLOCK_SIZE * NUM_KV_HEADS * D
    maxima, sums, total = attend(
        (maxima, sums, tl.zeros([TILE_M, D_PAD], tl.float32)), next_blocks, query, None, first_key, first_key,
        end_key, oldest, keys, values, table, NUM_KV_HEADS * D, scale, soft_cap,
        D, D_PAD, BLOCK_SIZE, TILE_K, WINDOW, CAPPED, DOT,
    )
    release(PDL)
    finish(
        maxima, sums, total, num_splits, out, partial, log_sums, counters, told,
        NUM_KV_HEADS, GROUP, D, D_PAD, TILE_M, MAX_SPLITS, HEADS, SHARED,
    )
# fmt: on


def paged_attention(
    counters: Counters,
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    batch: Ragged,
    scores: Scores,
    share: Share | None = None,
) -> Tensor:
    """See attention.PagedAttention; the input precision is the type of q, and parts meet at the counters."""
    scale, sliding_window, soft_cap, _, is_causal, keys_only, sinks = scores
    if not is_causal:
        return attend_to_both_sides(q, cache, block_tables, batch, scores)
    cu_q_lens, kv_lens = batch.cu_q_lens, batch.kv_lens
    assert cache.is_contiguous() and block_tables.stride(1) == 1
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    factors = scale / (soft_cap or 1.0) * _LOG2_E, soft_cap * _LOG2_E, out if sinks is None else sinks
    num_seen, told = share or (out, out)
    kind = {"WINDOW": sliding_window, "CAPPED": soft_cap > 0, "SINKS": sinks is not None} | overlapped()
    kind["SHARED"] = share is not None
    shapes = Shapes(q.shape[1], cache.shape, q.dtype, cache.dtype)
    n = len(kv_lens) if len(q) == len(kv_lens) else batch.num_singles
    first, rest = (*factors, num_seen, told), (*factors, num_seen[n:], told[n:])
    singles = Call(q[:n], cache, block_tables, kv_lens[:n], out, first, shapes, kind)
    others = Call(q[n:], cache, block_tables[n:], kv_lens[n:], out[n:], rest, shapes, kind)
    if cache.shape[1] == 1:
        assert sinks is None
        attend_to_latents(singles, others, cu_q_lens[n:], keys_only)
        return out
    if n and batch.common_start and not sliding_window and cache.shape[2] % 8 == 0:
        attend_shared_prefix(singles)
    elif n:
        _decode(singles, counters)
    if n < len(kv_lens):
        _prefill(others, cu_q_lens[n:])
    return out


def _decode(call: Call, counters: Counters) -> None:
    q, cache, block_tables, kv_lens, out, factors, shapes, kind = call
    num_requests, num_heads, head_dim = q.shape
    num_pairs = num_requests * cache.shape[3]
    longest = min(block_tables.shape[1] * cache.shape[2], kind["WINDOW"] or 1 << 30)
    is_swapped, constants = decode_tiles(shapes, num_pairs, kind["WINDOW"] > 0)
    min_keys, num_splits = split(num_pairs, longest, constants["TILE_K"])
    max_splits = power_of_2(num_splits)
    heads_at_once = max(1, _JOINED_AT_ONCE // (max_splits * constants["D_PAD"]))
    partial = stats = counter = out
    if num_splits > 1:
        partial = q.new_empty((num_requests, num_heads, max_splits, head_dim), dtype=torch.float32)
        stats = q.new_empty((num_requests, num_heads, max_splits), dtype=torch.float32)
        counter = counters.on(q.device, num_pairs)
    kernel = swap_ab_kernel if is_swapped else _decode_kernel
    source = describe(cache, constants["TILE_K"]) if is_swapped else cache
    tensors = q, source, block_tables, kv_lens, out, partial, stats, counter
    strides = q.stride(0), block_tables.stride(0)
    heads = min(power_of_2(constants["GROUP"]), heads_at_once)
    splits = {"MAX_SPLITS": max_splits, "MIN_KEYS": min_keys, "HEADS": heads}
    grid = cache.shape[3], num_requests, num_splits
    kernel[grid](*tensors, *strides, *factors, **splits, **constants, **kind)


def _prefill(call: Call, cu_q_lens: Tensor) -> None:
    q, cache, block_tables, kv_lens, out, factors, shapes, kind = call
    constants = prefill_tiles(shapes)
    num_tiles = len(q) // (constants["TILE_M"] // constants["GROUP"]) + len(kv_lens)
    tensors = q, cache, block_tables, cu_q_lens, kv_lens, out
    sizes = q.stride(0), block_tables.stride(0), len(kv_lens)
    _prefill_kernel[(num_tiles, cache.shape[3])](*tensors, *sizes, *factors, **constants, **kind)
