"""Decode attention with swapped operands: keys are the tall side of its products; tiles are copied by TMA.

Tensor cores take 16 rows and 8 columns at least. With heads as the rows, as in `online_softmax`, a group of 4
leaves 12 of them empty. Here keys, then the dimensions of their values, are the rows, and heads the columns:
half the products, powers and sums. It is not their time that counts, which passes while memory is read, but
their energy: a device that is full has no more to spend.

The unit that copies tiles (TMA) sees the cache as [halves of blocks, slots, values of a slot]. The last tile
ends with the last key: of what the one before it has held, nothing is added, and what lies before the block
is not read but zero. So all tiles are alike, and nothing behind the last key, which may be anything, is read.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.runtime.kernels.triton.launch import release, wait
from octavo.runtime.kernels.triton.online_softmax import begin_rows
from octavo.runtime.kernels.triton.split_keys import finish, own_split


# fmt: off
@triton.jit
def _step(
    state, k, v, query, num_past, scale, soft_cap,
    TILE_K: tl.constexpr, CAPPED: tl.constexpr, DOT: tl.constexpr,
):
    """Attend to one tile of keys, without its first `num_past`: new (maxima, sums, weighted values)."""
    maxima, sums, total = state
    scores = tl.dot(k.to(DOT), query, input_precision="ieee")
    if CAPPED:  # tanh, in terms of the base 2 that `scale` brings
        scores = soft_cap - 2.0 * soft_cap / (1.0 + tl.exp2(2.0 * scale * scores))
        scale = 1.0
    if num_past > 0:
        scores = tl.where((tl.arange(0, TILE_K) >= num_past)[:, None], scores, float("-inf"))
    higher = tl.maximum(maxima, tl.max(scores, 0) * scale)
    weights = tl.exp2(scores * scale - higher[None, :])
    fade = tl.exp2(maxima - higher)[None, :]
    total = tl.dot(tl.trans(v.to(DOT)), weights.to(DOT), total * fade, input_precision="ieee")
    return higher, sums * fade + weights, total


@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["block_tables", "kv_lens", "num_seen", "told"],
)
def swap_ab_kernel(
    q, halves, block_tables, kv_lens, out, partial, log_sums, counters,
    stride_q, stride_table, scale, soft_cap, sinks, num_seen, told,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
    MAX_SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr, HEADS: tl.constexpr,
):
    """Attend to one part of a request's key head; see attention._decode_kernel. halves: `describe`'s."""
    tl.static_assert(WINDOW == 0)
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kv_len = tl.load(kv_lens + request)
    first_key, end_key, num_splits = own_split(0, kv_len, TILE_K, MIN_KEYS)
    table = block_tables + request * stride_table
    next_blocks = tl.load(table + first_key // BLOCK_SIZE, mask=first_key < end_key, other=0)
    wait(PDL)
    if tl.program_id(2) >= tl.maximum(num_splits, 1):
        return

    h, d, part = tl.arange(0, TILE_M), tl.arange(0, D), tl.program_id(2)
    source = q + request * stride_q + ((head * GROUP + h) * D)[None, :] + d[:, None]
    query = tl.load(source, mask=(h < GROUP)[None, :], other=0.0).to(DOT)
    maxima, sums = begin_rows(sinks, head * GROUP + h, (h < GROUP) & (part == 0), TILE_M, SINKS)
    sums = tl.where((tl.arange(0, TILE_K) == 0)[:, None], sums[None, :], 0.0)
    state = maxima, sums, tl.zeros([D, TILE_M], tl.float32)
    for start in range(first_key, end_key, TILE_K):
        num_past = tl.maximum(start + TILE_K - end_key, 0)
        half, slot = next_blocks * 2, start % BLOCK_SIZE - num_past
        next_key = start + TILE_K
        next_blocks = tl.load(table + next_key // BLOCK_SIZE, mask=next_key < end_key, other=0)
        k = halves.load([half, slot, head * D]).reshape(TILE_K, D)
        v = halves.load([half + 1, slot, head * D]).reshape(TILE_K, D)
        state = _step(state, k, v, query, num_past, scale, soft_cap, TILE_K, CAPPED, DOT)
    release(PDL)
    maxima, sums, total = state
    finish(
        maxima, tl.sum(sums, 0), tl.trans(total), num_splits, out, partial, log_sums, counters,
        told, NUM_KV_HEADS, GROUP, D, D_PAD, TILE_M, MAX_SPLITS, HEADS, SHARED,
    )
# fmt: on


def describe(cache: Tensor, tile_k: int) -> TensorDescriptor:
    """Describe tiles of one head, [1, tile_k, D], to be copied. cache: [blocks, 2, slots, key heads, D]."""
    num_blocks, _, block_size, num_kv_heads, head_dim = cache.shape
    halves = cache.view(num_blocks * 2, block_size, num_kv_heads * head_dim)
    return TensorDescriptor(halves, list(halves.shape), list(halves.stride()), [1, tile_k, head_dim])
