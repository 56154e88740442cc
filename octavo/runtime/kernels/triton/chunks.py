"""Attention in chunks of the context: the cuts of a step's requests, a program for each piece."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.attention import Pieces, Ragged
from octavo.runtime.kernels.triton.launch import power_of_2


@triton.jit(do_not_specialize=["singles", "most", "max_blocks"])
def _cut_kernel(
    cu_q_lens, kv_lens, tables, bounds, lens, own, singles, most, table_stride, max_blocks,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    behind = tl.maximum(place - singles, 0)
    request = tl.where(place < singles, place, singles + behind // most)
    first, end = tl.load(cu_q_lens + request), tl.load(kv_lens + request)
    after = tl.load(cu_q_lens + request + 1)
    begin = tl.maximum(end - (after - first), 0)
    chunk = begin // SIZE + behind % most
    tl.store(bounds + place, first + tl.minimum(tl.maximum(chunk * SIZE - begin, 0), after - first))
    if place == tl.num_programs(0) - 1:
        tl.store(bounds + place + 1, after)
    tl.store(lens + place, tl.maximum(tl.minimum(end - chunk * SIZE, SIZE), tl.minimum(end, 1)))
    column = tl.arange(0, WIDTH)
    source = tables + request.to(tl.int64) * table_stride
    block = tl.load(source + tl.minimum(chunk * BLOCKS + column, max_blocks - 1), mask=column < BLOCKS)
    tl.store(own + place.to(tl.int64) * BLOCKS + column, block, mask=column < BLOCKS)


def cut_chunks(batch: Ragged, block_tables: Tensor, size: int, blocks: int, most: int) -> Pieces:
    """See attention.CutChunks."""
    singles = batch.num_singles
    count = singles + (len(batch.kv_lens) - singles) * most
    pieces = Pieces(*(batch.kv_lens.new_empty(shape) for shape in (count + 1, count, (count, blocks))))
    sizes = singles, most, block_tables.stride(0), block_tables.shape[1]
    given = batch.cu_q_lens, batch.kv_lens, block_tables, *pieces, *sizes
    if not count:
        return pieces._replace(cu_q_lens=batch.cu_q_lens)
    _cut_kernel[(count,)](*given, SIZE=size, BLOCKS=blocks, WIDTH=power_of_2(blocks), num_warps=1)
    return pieces
