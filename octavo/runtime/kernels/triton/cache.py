"""Kernels over the paged cache: store new keys and values, attend to what is stored.

Attention follows FlashAttention-2 (https://arxiv.org/abs/2307.08691): a program keeps a tile of queries and
walks over the keys they see with a running softmax. All query heads of one key head share the tile: row m is
query m // GROUP of the tile and head m % GROUP of the group, so a decoding request, too, fills a tensor core.

No launch depends on a length the host would have to fetch. A batch in which every request has one new token
is cut over its keys (split-KV), and a second kernel joins the parts; how far, the shapes decide.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.triton.sizes import power_of_2

_LOG2_E = 1.4426950408889634
_NUM_PROGRAMS = 4 * 132  # one wave of decoding programs on the GPUs this was tuned on
_MIN_KEYS = 64  # fewest keys of a part
_MIN_KEYS_OF_MANY = 1024  # the same where the batch alone nearly fills the device
_MAX_PARTS = 32


@triton.jit
def _write_kernel(
    k, v, cache, slots, stride_k, stride_v, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """One program per token: its keys and values of all heads. SIZE = heads * head_dim, WIDTH = padded."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        column = tl.arange(0, WIDTH)
        inside = column < SIZE
        target = cache + (slot // BLOCK_SIZE * 2 * BLOCK_SIZE + slot % BLOCK_SIZE) * SIZE + column
        key = tl.load(k + token * stride_k + column, mask=inside)
        tl.store(target, key.to(cache.dtype.element_ty), mask=inside)
        value = tl.load(v + token * stride_v + column, mask=inside)
        tl.store(target + BLOCK_SIZE * SIZE, value.to(cache.dtype.element_ty), mask=inside)


def write_kv(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    """See table.WriteKV."""
    assert cache.is_contiguous()
    size = cache.shape[3] * cache.shape[4]
    if len(slots):
        _write_kernel[(len(slots),)](
            k,
            v,
            cache,
            slots,
            k.stride(0),
            v.stride(0),
            SIZE=size,
            BLOCK_SIZE=cache.shape[2],
            WIDTH=power_of_2(size),
        )


@triton.jit
def _locate(cu_q_lens, tile, num_requests, TILE_Q: tl.constexpr, ONE_EACH: tl.constexpr):
    """(request, its first token in the batch, its number of new tokens, the tile's first of these).

    Tiles of request r begin at number cu_q_lens[r] // TILE_Q + r; surplus ones lie behind the request's end.
    """
    low, high = tile, tile  # with one new token each, the tile is the request
    if not ONE_EACH:
        low, high = tile * 0, num_requests
        while low < high:
            middle = (low + high) // 2
            if tl.load(cu_q_lens + middle) // TILE_Q + middle <= tile:
                low = middle + 1
            else:
                high = middle
        low -= 1
    begin = tl.load(cu_q_lens + low)
    q_len = tl.load(cu_q_lens + low + 1) - begin
    return low, begin, q_len, 0 if ONE_EACH else (tile - begin // TILE_Q - low) * TILE_Q


@triton.jit
def _visit(
    state,
    query,
    position,
    first_key,
    end_key,
    oldest,
    keys,
    values,
    table,
    stride_slot,
    scale,
    soft_cap,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_K: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Attend to keys first_key … end_key - 1 and return the new (maxima, sums, weighted values).

    Without MASKED every query of the tile sees all of these keys. Keys before `oldest` are not read.
    """
    maxima, sums, total = state
    d = tl.arange(0, D_PAD)
    column = tl.arange(0, TILE_K)
    for start in range(first_key, end_key, TILE_K):
        key = start + column
        stored = (key >= oldest) & (key < end_key) if MASKED else key >= 0
        block = tl.load(table + key // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
        offset = block * (2 * BLOCK_SIZE * stride_slot) + key % BLOCK_SIZE * stride_slot
        inside = stored[:, None] & (d[None, :] < D)
        k = tl.load(keys + offset[:, None] + d[None, :], mask=inside, other=0.0).to(DOT)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:  # tanh, in terms of the base 2 that `scale` brings
            scores = soft_cap - 2.0 * soft_cap / (1.0 + tl.exp2(2.0 * scores))
        if MASKED:
            visible = stored[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(maxima, tl.max(scores, 1))
        # A row that has seen no key yet stays at 0 instead of becoming -inf - -inf.
        shift = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(maxima - shift)
        v = tl.load(values + offset[:, None] + d[None, :], mask=inside, other=0.0).to(DOT)
        total = tl.dot(weights.to(DOT), v, total * fade[:, None], input_precision="ieee")
        sums = sums * fade + tl.sum(weights, 1)
        maxima = higher
    return maxima, sums, total


# fmt: off
@triton.jit(do_not_specialize=["num_requests", "stride_table"])
def _attention_kernel(
    q, cache, block_tables, cu_q_lens, kv_lens, out, part_stats,
    stride_q, stride_table, num_requests, scale, soft_cap,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, ONE_EACH: tl.constexpr, NUM_PARTS: tl.constexpr, DOT: tl.constexpr,
):
    """One tile of queries, one key head, one part of the keys.

    With one part, `out` is the result; with more it takes each part's own, and `part_stats` its log-sum.
    """
    TILE_Q: tl.constexpr = TILE_M // GROUP
    head, part = tl.program_id(1), tl.program_id(2)
    request, begin, q_len, first_q = _locate(cu_q_lens, tl.program_id(0), num_requests, TILE_Q, ONE_EACH)
    if first_q >= q_len:
        return
    kv_len = tl.load(kv_lens + request)
    first_position = kv_len - q_len + first_q
    end_key = tl.minimum(first_position + TILE_Q, kv_len)
    oldest = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    first_key = oldest // TILE_K * TILE_K
    if NUM_PARTS > 1:
        part_size = tl.cdiv(tl.cdiv(end_key - first_key, NUM_PARTS), TILE_K) * TILE_K
        first_key += part * part_size
        end_key = tl.minimum(first_key + part_size, end_key)

    row, d = tl.arange(0, TILE_M), tl.arange(0, D_PAD)
    index = first_q + row // GROUP
    position = kv_len - q_len + index
    real = (row < TILE_Q * GROUP) & (index < q_len)
    inside = real[:, None] & (d[None, :] < D)
    token, column = (begin + index).to(tl.int64), head * GROUP + row % GROUP
    source = q + (token * stride_q + column * D)[:, None] + d[None, :]
    query = tl.load(source, mask=inside, other=0.0).to(DOT)
    maxima, sums = tl.full([TILE_M], float("-inf"), tl.float32), tl.zeros([TILE_M], tl.float32)
    state = maxima, sums, tl.zeros([TILE_M, D_PAD], tl.float32)
    keys = cache + head * D
    values = keys + BLOCK_SIZE * NUM_KV_HEADS * D
    table = block_tables + request.to(tl.int64) * stride_table
    whole_end = first_key
    if WINDOW == 0:  # whole tiles of keys that all queries see need no mask
        whole = tl.minimum(first_position + 1, end_key) - first_key
        whole_end += tl.maximum(whole // TILE_K * TILE_K, 0)
        state = _visit(
            state, query, position, first_key, whole_end, oldest, keys, values, table, NUM_KV_HEADS * D,
            scale, soft_cap, D, D_PAD, BLOCK_SIZE, TILE_K, WINDOW, CAPPED, False, DOT,
        )
    maxima, sums, total = _visit(
        state, query, position, whole_end, end_key, oldest, keys, values, table, NUM_KV_HEADS * D,
        scale, soft_cap, D, D_PAD, BLOCK_SIZE, TILE_K, WINDOW, CAPPED, True, DOT,
    )
    total = total / tl.where(sums == 0.0, 1.0, sums)[:, None]
    place = token * (NUM_KV_HEADS * GROUP) + column
    if NUM_PARTS > 1:
        place = place * NUM_PARTS + part
        log_sum = tl.where(sums == 0.0, float("-inf"), maxima + tl.log2(sums))
        tl.store(part_stats + place, log_sum, mask=real)
    tl.store(out + place[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=inside)
# fmt: on


@triton.jit
def _join_kernel(parts, part_stats, out, D: tl.constexpr, D_PAD: tl.constexpr, NUM_PARTS: tl.constexpr):
    """One program per query and head: the parts, weighted by what each saw. An empty part weighs nothing."""
    place = tl.program_id(0).to(tl.int64)
    part = place * NUM_PARTS + tl.arange(0, NUM_PARTS)
    d = tl.arange(0, D_PAD)
    log_sums = tl.load(part_stats + part)
    weights = tl.exp2(log_sums - tl.max(log_sums, 0))
    values = tl.load(parts + part[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)
    joined = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + place * D + d, joined.to(out.dtype.element_ty), mask=d < D)


def paged_attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_q_lens: Tensor,
    kv_lens: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """See table.PagedAttention."""
    assert cache.is_contiguous() and block_tables.stride(1) == 1
    num_tokens, num_heads, head_dim = q.shape
    num_requests = len(kv_lens)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not num_tokens:
        return out
    one_each = num_tokens == num_requests
    constants = _constants(num_heads, cache.shape, q.dtype, cache.dtype, one_each)
    longest = min(block_tables.shape[1] * cache.shape[2], sliding_window or 1 << 30)
    num_parts = _num_parts(num_requests * cache.shape[3], longest) if one_each else 1
    parts = stats = out
    if num_parts > 1:
        parts = q.new_empty((num_tokens, num_heads, num_parts, head_dim), dtype=torch.float32)
        stats = q.new_empty((num_tokens, num_heads, num_parts), dtype=torch.float32)
    tile_q = constants["TILE_M"] // constants["GROUP"]
    num_tiles = num_requests if one_each else num_tokens // tile_q + num_requests
    _attention_kernel[(num_tiles, cache.shape[3], num_parts)](
        q,
        cache,
        block_tables,
        cu_q_lens,
        kv_lens,
        parts,
        stats,
        q.stride(0),
        block_tables.stride(0),
        num_requests,
        scale / (soft_cap or 1.0) * _LOG2_E,
        soft_cap * _LOG2_E,
        WINDOW=sliding_window,
        CAPPED=soft_cap > 0,
        NUM_PARTS=num_parts,
        **constants,
    )
    if num_parts > 1:
        sizes = {"D": head_dim, "D_PAD": constants["D_PAD"], "NUM_PARTS": num_parts}
        _join_kernel[(num_tokens * num_heads,)](parts, stats, out, **sizes)
    return out


def _num_parts(num_pairs: int, longest: int) -> int:
    """Into how many parts the keys of each (request, key head) are cut: one wave of programs at most."""
    few_keys = _MIN_KEYS if num_pairs * 4 <= _NUM_PROGRAMS else _MIN_KEYS_OF_MANY
    fitting = min(_NUM_PROGRAMS // num_pairs, longest // few_keys, _MAX_PARTS)
    return max(1, 1 << max(0, fitting.bit_length() - 1))  # powers of two: few variants to compile


@functools.cache
def _constants(
    num_heads: int, cache_shape: torch.Size, q_type: torch.dtype, cache_type: torch.dtype, one_each: bool
) -> dict[str, Any]:
    """What the attention kernel is compiled for; tiles, warps and stages as measured on one H200."""
    _, _, block_size, num_kv_heads, head_dim = cache_shape
    group = num_heads // num_kv_heads
    heads = max(16, power_of_2(group))
    dot = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(q_type, tl.float32)
    if torch.float32 in {q_type, cache_type} or triton.knobs.runtime.interpret:
        dot, tiles = tl.float32, (heads if one_each else max(32, heads), 32, 4, 2)
    elif one_each:
        tiles = (heads, 64, 4, 2 if head_dim > 128 else 4)
    elif head_dim > 128:
        tiles = (max(128, heads), 64, 8, 2)
    elif block_size >= 64:
        tiles = (max(128, heads), 128, 8, 2)
    else:
        tiles = (max(64, heads), 64, 4, 3)
    names = ("TILE_M", "TILE_K", "num_warps", "num_stages")
    return dict(zip(names, tiles, strict=True)) | {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "D": head_dim,
        "D_PAD": max(16, power_of_2(head_dim)),
        "BLOCK_SIZE": block_size,
        "ONE_EACH": one_each,
        "DOT": dot,
    }
