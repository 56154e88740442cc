"""Attention of decoding requests that have their beginnings in common: one program for a few neighbours.

A tile of queries has room for more than the heads of one request. Here it holds those of PACK requests, one
after the other: what their block tables have in common they attend together, so it is read once for all of
them; then each visits the rest of its own. Which blocks those are is read on the device, so the result is
right for any requests; that it pays, the caller knows.

The idea of attending to a shared prefix once is Hydragen's (https://arxiv.org/abs/2402.05099).
"""

import triton
import triton.language as tl

from octavo.runtime.kernels.triton.launch import cdiv, power_of_2, release, wait
from octavo.runtime.kernels.triton.online_softmax import attend, begin_rows, log_of_sum, look_up
from octavo.runtime.kernels.triton.tiles import Call, shared_prefix_tiles


@triton.jit
def _common_blocks(
    table, stride_table, number, shortest, PACK: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """Return how many first blocks the tables of `number` requests have in common, all of them full."""
    common = shortest // BLOCK_SIZE
    block = tl.arange(0, WIDTH)
    first = tl.load(table + block, mask=block < common, other=0)
    for index in tl.static_range(1, PACK):
        there = (block < common) & (index < number)
        other = tl.load(table + index * stride_table + block, mask=there, other=0)
        common = tl.minimum(common, tl.min(tl.where(there & (other != first), block, WIDTH), 0))
    return common


# fmt: off
@triton.jit(do_not_specialize=["num_requests", "stride_table"])
def _packed_kernel(
    q, cache, block_tables, kv_lens, out, stride_q, stride_table, num_requests, scale, soft_cap,
    sinks, num_seen, told,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, SHARED: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr, PACK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Attend for one key head of PACK requests; row m of the tile is head m % GROUP of request m // GROUP."""
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64) * PACK
    row, d = tl.arange(0, TILE_M), tl.arange(0, D_PAD)
    member = row // GROUP
    number = tl.minimum(num_requests - request, PACK).to(tl.int32)
    there = member < number
    inside = there[:, None] & (d < D)[None, :]
    table = block_tables + request * stride_table
    lens = tl.load(kv_lens + request + member, mask=there, other=1 << 30)
    common = _common_blocks(table, stride_table, number, tl.min(lens, 0), PACK, BLOCK_SIZE, WIDTH)
    common *= BLOCK_SIZE
    wait(PDL)
    column = head * GROUP + row % GROUP
    query = tl.load(
        q + ((request + member) * stride_q + column * D)[:, None] + d[None, :], mask=inside, other=0.0
    ).to(DOT)
    maxima, sums = begin_rows(sinks, column, there, TILE_M, SINKS)
    keys = cache + head * D
    values = keys + BLOCK_SIZE * NUM_KV_HEADS * D
    next_blocks = look_up(table, 0, common, BLOCK_SIZE, TILE_K)
    maxima, sums, total = attend(
        (maxima, sums, tl.zeros([TILE_M, D_PAD], tl.float32)), next_blocks, query, lens, 0, common, common, 0,
        keys, values, table, NUM_KV_HEADS * D, scale, soft_cap,
        D, D_PAD, BLOCK_SIZE, TILE_K, 0, CAPPED, DOT,
    )
    for index in range(number):
        kv_len = tl.load(kv_lens + request + index)
        position = tl.where(member == index, kv_len - 1, -1)
        own = table + index * stride_table
        next_blocks = look_up(own, common, kv_len, BLOCK_SIZE, TILE_K)
        maxima, sums, total = attend(
            (maxima, sums, total), next_blocks, query, position, common, common, kv_len, 0, keys, values,
            own, NUM_KV_HEADS * D, scale, soft_cap, D, D_PAD, BLOCK_SIZE, TILE_K, 0, CAPPED, DOT,
        )
    release(PDL)
    total = total / tl.where(sums == 0.0, 1.0, sums)[:, None]
    place = (request + member) * (NUM_KV_HEADS * GROUP) + column
    tl.store(out + place[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=inside)
    if SHARED:
        tl.store(told + place, log_of_sum(maxima, sums), mask=there)
# fmt: on


def attend_shared_prefix(call: Call) -> None:
    """Fill `out` for requests of one new token each; no window."""
    q, cache, block_tables, kv_lens, out, factors, shapes, kind = call
    constants = shared_prefix_tiles(shapes, len(q))
    tensors = q, cache, block_tables, kv_lens, out
    sizes = q.stride(0), block_tables.stride(0), len(q)
    own = {name: value for name, value in kind.items() if name != "WINDOW"}
    own["WIDTH"] = power_of_2(block_tables.shape[1])
    grid = cache.shape[3], cdiv(len(q), constants["PACK"])
    _packed_kernel[grid](*tensors, *sizes, *factors, **constants, **own)
