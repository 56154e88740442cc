"""What a recorded step begins and ends with: one kernel each, so that nothing is copied beside its graph.

Both reach the host's memory over the bus. A copy before a graph and two behind it cost 30 µs a step on an
H200, most of it in waiting.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.steps import StepRing
from octavo.runtime.kernels.triton.launch import (
    NUM_PROGRAMS,
    Counters,
    cdiv,
    is_last,
    overlapped,
    power_of_2,
    release,
    wait,
)

_NUMBERS = _END_ROWS = 128  # of one program
_TABLE_ROWS = 8
_MOST_COLUMNS = 256
_TILE = 4096  # tokens


# fmt: off
# What a size is divisible by must not decide what is compiled.
@triton.jit(do_not_specialize=["num_numbers", "num_tokens", "num_rows", "num_parts"])
def _begin_kernel(
    given, begun, numbers, kept_ids, kept_tables, ids, tables, counter,
    num_numbers, num_tokens, num_rows, num_parts, num_groups, num_columns, given_stride, table_stride,
    LENGTH: tl.constexpr, NUMBERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Copy NUMBERS numbers in each of `num_parts` first programs; in others, ROWS rows of all groups' tables.

    The host's memory is read in wide pieces: threads one by one (as by volatile loads) took 60 µs. It begins
    behind all that was given out before, without overlap: then no cache holds what was there earlier.
    """
    program = tl.program_id(0)
    index = tl.load(begun)
    given += index % LENGTH * given_stride
    if program < num_parts:
        place = program * NUMBERS + tl.arange(0, NUMBERS)
        value = tl.load(given + place, mask=place < num_numbers, other=0)
        tl.store(numbers + place, value, mask=place < num_numbers)
        is_token = place < num_tokens
        token_id = tl.load(kept_ids + value, mask=is_token, other=0)
        tl.store(ids + place, tl.maximum(token_id, 0), mask=is_token)
    else:
        row = (program - num_parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        kept = tl.load(given + num_tokens + row, mask=row < num_rows, other=0)
        for first in range(0, num_columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)[None, :]
            inside = (row < num_rows)[:, None] & (column < num_columns)
            for group in range(num_groups):
                source = kept_tables + group * table_stride + kept[:, None] * num_columns
                target = tables + (group * num_rows + row[:, None]) * num_columns
                tl.store(target + column, tl.load(source + column, mask=inside, other=0), mask=inside)
    if is_last(counter, tl.num_programs(0)):
        tl.store(begun, index + 1)


@triton.jit(do_not_specialize=["per_program"])
def _mask_kernel(
    logits, words, begun, masks, stride, masks_stride, per_program,
    SIZE: tl.constexpr, NUM_WORDS: tl.constexpr, LENGTH: tl.constexpr, TILE: tl.constexpr,
):
    """Write over the forbidden logits in `per_program` tiles of one row.

    It reads the host's memory, as few times as it can, and like the first kernel without overlap.
    """
    row = tl.program_id(1).to(tl.int64)
    number = tl.load(masks + (tl.load(begun) + LENGTH - 1) % LENGTH * masks_stride + row)
    if number >= 0:
        for tile in range(tl.program_id(0) * per_program, (tl.program_id(0) + 1) * per_program):
            column = tile * TILE + tl.arange(0, TILE)
            word = tl.load(words + number * NUM_WORDS + column // 32, mask=column < SIZE, other=-1)
            is_forbidden = (word >> (column % 32)) & 1 == 0
            tl.store(logits + row * stride + column, float("-inf"), mask=(column < SIZE) & is_forbidden)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["targets", "drafts"])
def _end_kernel(
    token_ids, max_logits, targets, kept_ids, begun, ring_ids, ring_maxima, drafts, ring_drafts,
    num_rows, stride, last_id,
    LENGTH: tl.constexpr, ROWS: tl.constexpr, TELLS: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    wait(PDL)
    release(PDL)
    index = (tl.load(begun) + LENGTH - 1) % LENGTH
    token_id = tl.load(token_ids + row, mask=there, other=0)
    token_id = tl.minimum(tl.maximum(token_id, 0), last_id)
    tl.store(kept_ids + tl.load(targets + row, mask=there, other=0), token_id, mask=there)
    tl.store(ring_ids + index * stride + row, token_id, mask=there)
    tl.store(ring_maxima + index * stride + row, tl.load(max_logits + row, mask=there, other=0.0), mask=there)
    if TELLS:
        draft = tl.load(drafts + row, mask=there, other=0)
        tl.store(ring_drafts + index * stride + row, draft, mask=there)
# fmt: on


def begin_step(
    counters: Counters,
    ring: StepRing,
    numbers: Tensor,
    kept_ids: Tensor,
    kept_tables: Tensor,
    ids: Tensor,
    tables: Tensor,
) -> None:
    """See steps.BeginStep; its programs meet at a counter."""
    num_groups, num_rows, num_columns = tables.shape
    num_parts = cdiv(len(numbers), _NUMBERS)
    counter = counters.on(numbers.device, 1)
    tensors = ring.given, ring.begun, numbers, kept_ids, kept_tables, ids, tables, counter
    sizes = len(numbers), len(ids), num_rows, num_parts, num_groups, num_columns
    strides = ring.given.stride(0), kept_tables.stride(0)
    columns = min(power_of_2(num_columns), _MOST_COLUMNS)
    tiles = {"LENGTH": len(ring.given), "NUMBERS": _NUMBERS, "ROWS": _TABLE_ROWS, "COLUMNS": columns}
    grid = (num_parts + cdiv(num_rows, _TABLE_ROWS),)
    # More warps would read the rows again, each of them.
    _begin_kernel[grid](*tensors, *sizes, *strides, num_warps=1, **tiles)


def mask_step(ring: StepRing, logits: Tensor, words: Tensor) -> None:
    """See steps.MaskStep."""
    num_rows, size = logits.shape
    num_tiles = cdiv(size, _TILE)
    per_program = cdiv(num_tiles * num_rows, NUM_PROGRAMS)
    sizes = logits.stride(0), ring.masks.stride(0), per_program
    fixed = {"SIZE": size, "NUM_WORDS": words.shape[1], "LENGTH": len(ring.masks), "TILE": _TILE}
    grid = cdiv(num_tiles, per_program), num_rows
    _mask_kernel[grid](logits, words, ring.begun, ring.masks, *sizes, **fixed)


def end_step(
    ring: StepRing,
    token_ids: Tensor,
    max_logits: Tensor,
    targets: Tensor,
    kept_ids: Tensor,
    vocab_size: int,
    drafts: Tensor,
) -> None:
    """See steps.EndStep."""
    num_rows = len(token_ids)
    given = token_ids, max_logits, targets, kept_ids
    written = ring.begun, ring.token_ids, ring.max_logits, drafts, ring.drafts
    sizes = num_rows, ring.token_ids.stride(0), vocab_size - 1
    _end_kernel[(cdiv(num_rows, _END_ROWS),)](
        *given,
        *written,
        *sizes,
        LENGTH=len(ring.token_ids),
        ROWS=_END_ROWS,
        TELLS=len(drafts) > 0,
        num_warps=4,
        **overlapped(),
    )
