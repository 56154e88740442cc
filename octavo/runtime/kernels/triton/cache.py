"""Kernels over the paged cache: store new keys and values, attend to what is stored.

Attention follows FlashAttention-2 (https://arxiv.org/abs/2307.08691): a program keeps a tile of queries and
walks over the keys they see with a running softmax. All query heads of one key head share the tile: row m is
query m // GROUP of the tile and head m % GROUP of the group, so a decoding request, too, fills a tensor core.

No launch depends on a length the host would have to fetch. A batch in which every request has one new token
is cut over its keys (split-KV), and a second kernel joins the parts; how far, the shapes decide.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
            WIDTH=triton.next_power_of_2(size),
        )


@triton.jit
def _request_of_tile(cu_q_lens, tile, num_requests, TILE_Q: tl.constexpr):
    """The request whose tiles hold `tile`: request r has its first at cu_q_lens[r] // TILE_Q + r."""
    low, high = 0, num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_q_lens + middle) // TILE_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


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
    stride_block,
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
        offset = block * stride_block + key % BLOCK_SIZE * stride_slot
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


@triton.jit(do_not_specialize=["num_requests", "stride_table"])
def _attention_kernel(
    q,
    cache,
    block_tables,
    cu_q_lens,
    kv_lens,
    out,
    part_stats,
    stride_q,
    stride_table,
    num_requests,
    scale,
    soft_cap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    ONE_EACH: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile of queries, one key head, one part of the keys.

    With one part, `out` is the result; with more it takes each part's own, and `part_stats` its log-sum.
    """
    TILE_Q: tl.constexpr = TILE_M // GROUP
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ONE_EACH:
        request, first_q, q_len = tile, 0, 1
        begin = tile
    else:
        request = _request_of_tile(cu_q_lens, tile, num_requests, TILE_Q)
        begin = tl.load(cu_q_lens + request)
        q_len = tl.load(cu_q_lens + request + 1) - begin
        first_q = (tile - begin // TILE_Q - request) * TILE_Q
    if first_q >= q_len:
        return
    kv_len = tl.load(kv_lens + request)
    row = tl.arange(0, TILE_M)
    index = first_q + row // GROUP
    real = (row < TILE_Q * GROUP) & (index < q_len)
    position = kv_len - q_len + index
    first_position = kv_len - q_len + first_q
    end_key = tl.minimum(first_position + TILE_Q, kv_len)
    oldest = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    first_key = oldest // TILE_K * TILE_K
    if NUM_PARTS > 1:
        part_size = tl.cdiv(tl.cdiv(end_key - first_key, NUM_PARTS), TILE_K) * TILE_K
        first_key += part * part_size
        end_key = tl.minimum(first_key + part_size, end_key)

    d = tl.arange(0, D_PAD)
    columns = head * GROUP + row % GROUP
    tokens = (begin + index).to(tl.int64)
    inside = real[:, None] & (d[None, :] < D)
    query = tl.load(
        q + tokens[:, None] * stride_q + columns[:, None] * D + d[None, :], mask=inside, other=0.0
    ).to(DOT)
    state = (
        tl.full([TILE_M], float("-inf"), tl.float32),
        tl.zeros([TILE_M], tl.float32),
        tl.zeros([TILE_M, D_PAD], tl.float32),
    )
    stride_slot: tl.constexpr = NUM_KV_HEADS * D
    stride_block: tl.constexpr = 2 * BLOCK_SIZE * stride_slot
    keys = cache + head * D
    values = keys + BLOCK_SIZE * stride_slot
    table = block_tables + request.to(tl.int64) * stride_table
    # Whole tiles of keys that all queries see need no mask.
    whole = (tl.minimum(first_position + 1, end_key) - first_key) // TILE_K * TILE_K
    middle = first_key if WINDOW > 0 else first_key + tl.maximum(whole, 0)
    if WINDOW == 0:
        state = _visit(
            state, query, position, first_key, middle, oldest, keys, values, table, stride_slot, stride_block,
            scale, soft_cap, D, D_PAD, BLOCK_SIZE, TILE_K, WINDOW, CAPPED, False, DOT,
        )  # fmt: skip
    maxima, sums, total = _visit(
        state, query, position, middle, end_key, oldest, keys, values, table, stride_slot, stride_block,
        scale, soft_cap, D, D_PAD, BLOCK_SIZE, TILE_K, WINDOW, CAPPED, True, DOT,
    )  # fmt: skip
    total = total / tl.where(sums == 0.0, 1.0, sums)[:, None]
    place = tokens * (NUM_KV_HEADS * GROUP) + columns
    if NUM_PARTS > 1:
        place = place * NUM_PARTS + part
        log_sum = tl.where(sums == 0.0, float("-inf"), maxima + tl.log2(sums))
        tl.store(part_stats + place, log_sum, mask=real)
    tl.store(out + place[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _join_kernel(
    parts,
    part_stats,
    out,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One program per query and head: the parts, weighted by what each saw. An empty part weighs nothing."""
    place = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    d = tl.arange(0, D_PAD)
    log_sums = tl.load(part_stats + place * NUM_PARTS + part, mask=part < NUM_PARTS, other=float("-inf"))
    weights = tl.exp2(log_sums - tl.max(log_sums, 0))
    inside = (part < NUM_PARTS)[:, None] & (d[None, :] < D)
    values = tl.load(parts + (place * NUM_PARTS + part)[:, None] * D + d[None, :], mask=inside, other=0.0)
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
    _, _, block_size, num_kv_heads, _ = cache.shape
    group = num_heads // num_kv_heads
    one_each = num_tokens == num_requests
    dot, tile_m, tile_k, num_warps, num_stages = _tiles(q, cache, group, one_each)
    longest = min(block_tables.shape[1] * block_size, sliding_window or 1 << 30)
    num_parts = _num_parts(num_requests * num_kv_heads, longest) if one_each else 1
    if num_parts > 1:
        parts = torch.empty(
            (num_tokens, num_heads, num_parts, head_dim), dtype=torch.float32, device=q.device
        )
        stats = torch.empty((num_tokens, num_heads, num_parts), dtype=torch.float32, device=q.device)
    else:
        parts = stats = out
    tile_q = tile_m // group
    num_tiles = num_requests if one_each else num_tokens // tile_q + num_requests
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    _attention_kernel[(num_tiles, num_kv_heads, num_parts)](
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
        scale * _LOG2_E if not soft_cap else scale / soft_cap * _LOG2_E,
        soft_cap * _LOG2_E,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        D=head_dim,
        D_PAD=padded_dim,
        BLOCK_SIZE=block_size,
        TILE_M=tile_m,
        TILE_K=tile_k,
        WINDOW=sliding_window,
        CAPPED=soft_cap > 0,
        ONE_EACH=one_each,
        NUM_PARTS=num_parts,
        DOT=dot,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if num_parts > 1:
        _join_kernel[(num_tokens * num_heads,)](
            parts,
            stats,
            out,
            D=head_dim,
            D_PAD=padded_dim,
            NUM_PARTS=num_parts,
            PADDED=triton.next_power_of_2(num_parts),
        )
    return out


def _num_parts(num_pairs: int, longest: int) -> int:
    """Into how many parts the keys of `num_pairs` (request, key head) are cut: one wave of programs at most."""
    few_keys = _MIN_KEYS if num_pairs * 4 <= _NUM_PROGRAMS else _MIN_KEYS_OF_MANY
    fitting = min(_NUM_PROGRAMS // num_pairs, longest // few_keys, _MAX_PARTS)
    return max(1, 1 << max(0, fitting.bit_length() - 1))  # powers of two: few variants to compile


def _tiles(q: Tensor, cache: Tensor, group: int, one_each: bool) -> tuple[tl.dtype, int, int, int, int]:
    """(type of the operands, rows of queries, keys, warps, stages), as measured on one H200."""
    heads = max(16, triton.next_power_of_2(group))
    if torch.float32 in {q.dtype, cache.dtype} or triton.knobs.runtime.interpret:
        return tl.float32, heads if one_each else max(32, heads), 32, 4, 2
    dot = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[q.dtype]
    wide = q.shape[2] > 128
    if one_each:
        return dot, heads, 64, 4, 2 if wide else 4
    if wide:
        return dot, max(128, heads), 64, 8, 2
    if cache.shape[2] >= 64:
        return dot, max(128, heads), 128, 8, 2
    return dot, max(64, heads), 64, 4, 3
