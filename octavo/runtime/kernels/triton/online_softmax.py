"""The heart of the attention kernels: a tile of queries attends to a run of keys in the paged cache."""

import triton
import triton.language as tl


@triton.jit
def locate(cu_q_lens, tile, num_requests, TILE_Q: tl.constexpr):
    """Return (request, its first token in the batch, its new tokens, the tile's first of these).

    Tiles of request r begin at number start_r // TILE_Q + r; surplus ones lie behind the request's end.
    """
    base = tl.load(cu_q_lens)
    low, high = tile * 0, num_requests
    while low < high:
        middle = (low + high) // 2
        if (tl.load(cu_q_lens + middle) - base) // TILE_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    low -= 1
    begin = tl.load(cu_q_lens + low) - base
    q_len = tl.load(cu_q_lens + low + 1) - base - begin
    return low, begin, q_len, (tile - begin // TILE_Q - low) * TILE_Q


@triton.jit
def own_bounds(num_seen, first_q, q_len, TILE_Q: tl.constexpr):
    """Return (the last key that a tile's first query sees, the end of those that its last one sees).

    num_seen: of the request's queries, as in Share
    """
    last = tl.minimum(first_q + TILE_Q, q_len) - 1
    return tl.load(num_seen + first_q) - 1, tl.load(num_seen + last)


@triton.jit
def log_of_sum(maxima, sums):
    """Return what Share.log_sums has of rows. maxima: in base 2"""
    return (maxima + tl.log2(sums)) * 0.6931471805599453


@triton.jit
def look_up(table, start, end_key, BLOCK_SIZE: tl.constexpr, TILE_K: tl.constexpr):
    """Return the blocks of the keys from `start` on: a single one, where tiles do not cross blocks."""
    if BLOCK_SIZE % TILE_K == 0:
        return tl.load(table + start // BLOCK_SIZE, mask=start < end_key, other=0)
    else:  # noqa: RET505  # both branches of a constant are compiled after a return
        key = start + tl.arange(0, TILE_K)
        return tl.load(table + key // BLOCK_SIZE, mask=key < end_key, other=0)


@triton.jit
def _places(blocks, start, key, stride_slot, BLOCK_SIZE: tl.constexpr, TILE_K: tl.constexpr):
    """Return where the keys from `start` on lie; the first of them, where tiles do not cross blocks."""
    first = blocks.to(tl.int64) * (2 * BLOCK_SIZE)
    if BLOCK_SIZE % TILE_K == 0:
        return (first + start % BLOCK_SIZE) * stride_slot
    else:  # noqa: RET505  # as above
        return ((first + key % BLOCK_SIZE) * stride_slot)[:, None]


@triton.jit
def begin_rows(sinks, head, there, ROWS: tl.constexpr, SINKS: tl.constexpr):
    """Return (maxima, sums) of ROWS rows: of nothing seen, or of the sinks of these heads, where they are."""
    maxima, sums = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=there, other=0.0) * 1.4426950408889634
        maxima, sums = tl.where(there, sink, maxima), tl.where(there, 1.0, sums)
    return maxima, sums


@triton.jit
def _visible(stored, key, position, WINDOW: tl.constexpr):
    """Return which keys each query sees; without a position, all see all that are stored."""
    visible = stored[None, :]
    if position is not None:
        visible = visible & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
    return visible


# fmt: off
@triton.jit
def _step(
    state, next_blocks, start, query, position, end_key, oldest, keys, values, table,
    stride_slot, scale, soft_cap, inner,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_K: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr,
):
    """Attend to one tile of keys: the new (maxima, sums, weighted values), and the next tile's blocks."""
    maxima, sums, total = state
    key = start + tl.arange(0, TILE_K)
    stored = key < end_key if MASKED else key >= 0
    if WINDOW > 0:
        stored = stored & (key >= oldest)
    offset = _places(next_blocks, start, key, stride_slot, BLOCK_SIZE, TILE_K)
    next_blocks = look_up(table, start + TILE_K, end_key, BLOCK_SIZE, TILE_K)
    inside = stored[:, None] & (tl.arange(0, D_PAD) < D)[None, :]
    k = tl.load(keys + offset + inner, mask=inside, other=0.0).to(DOT)
    scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:  # tanh, in terms of the base 2 that `scale` brings
        scores = soft_cap - 2.0 * soft_cap / (1.0 + tl.exp2(2.0 * scores))
    if MASKED:
        scores = tl.where(_visible(stored, key, position, WINDOW), scores, float("-inf"))
    higher = tl.maximum(maxima, tl.max(scores, 1))
    # A row that has seen no key yet stays at 0 instead of becoming -inf - -inf.
    shift = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(maxima - shift)
    v = tl.load(values + offset + inner, mask=inside, other=0.0).to(DOT)
    total = tl.dot(weights.to(DOT), v, total * fade[:, None], input_precision="ieee")
    return (higher, sums * fade + tl.sum(weights, 1), total), next_blocks


@triton.jit
def attend(
    state, next_blocks, query, position, first_key, whole_end, end_key, oldest, keys, values, table,
    stride_slot, scale, soft_cap,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_K: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, DOT: tl.constexpr,
):
    """Attend to keys first_key … end_key - 1 and return the new (maxima, sums, weighted values).

    first_key: a multiple of TILE_K, whose blocks are `next_blocks`. Every query of the tile sees all keys
    before whole_end, which is another multiple; without a position, all later ones, too; with a window, those
    from `oldest` on, and none before is read. A tile's block is looked up one tile early. Where tiles do not
    cross blocks, the places of a tile's keys differ from the last one's by a single number: addresses were a
    quarter of all instructions.
    """
    inner = tl.arange(0, D_PAD)[None, :]
    if BLOCK_SIZE % TILE_K == 0:
        inner += tl.arange(0, TILE_K)[:, None] * stride_slot
    for masked in tl.static_range(2):
        for start in range(whole_end if masked else first_key, end_key if masked else whole_end, TILE_K):
            state, next_blocks = _step(
                state, next_blocks, start, query, position, end_key, oldest, keys, values, table,
                stride_slot, scale, soft_cap, inner,
                D, D_PAD, BLOCK_SIZE, TILE_K, WINDOW, CAPPED, masked == 1, DOT,
            )
    return state
# fmt: on
