"""Kernels of chained steps: one each for what takes some thirty small ones of torch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.messages.step import UNTOLD
from octavo.runtime.kernels.chained import Ahead, ChainKernels, ChainRows
from octavo.runtime.kernels.triton.launch import cdiv

_ROWS, _MOST, _TILE, _PARTS = 32, 128, 1024, 32
_VIEWS = list(ChainRows._fields)
"""Parts of one buffer: what they are aligned to must not decide what is compiled."""


# fmt: off
@triton.jit(do_not_specialize=["num_rows", "group"], do_not_specialize_on_alignment=_VIEWS)
def _move_kernel(
    places, rows, positions, output_positions, targets, kv_lens, num_known, drafts, cache_slots,
    lengths, kept_ids, tables, ids, num_rows, group, num_columns,
    SIZE: tl.constexpr, IS_FIRST: tl.constexpr, GUESSED: tl.constexpr, ROWS: tl.constexpr,
):
    """Move ROWS rows' counts, if this is the first launch, and their slots in one group."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    kv_len = tl.load(kv_lens + row, mask=there, other=1)
    if IS_FIRST:
        known = tl.load(num_known + row, mask=there, other=-1)
        length = tl.load(lengths + tl.load(rows + row, mask=there, other=0), mask=there, other=0)
        moved = tl.where(known >= 0, length - known, 0)
        place = tl.load(places + row, mask=there, other=0) + moved
        kv_len += moved.to(tl.int32)
        tl.store(places + row, place, mask=there)
        tl.store(kv_lens + row, kv_len, mask=there)
        for numbers in tl.static_range(3):
            at = (positions if numbers == 0 else output_positions if numbers == 1 else targets) + row
            tl.store(at, tl.load(at, mask=there, other=0) + moved, mask=there)
        draft = tl.load(drafts + row, mask=there, other=0)
        kept = tl.load(kept_ids + place, mask=there & (draft == GUESSED), other=0)
        draft = tl.where(draft == GUESSED, kept, draft)
        tl.store(drafts + row, draft, mask=there)
        tl.store(ids + row, tl.maximum(draft, 0), mask=there)
    place = kv_len - 1
    table = tables + (group * num_rows + row).to(tl.int64) * num_columns
    block = tl.load(table + place // SIZE, mask=there, other=0)
    at = cache_slots + group * num_rows + row
    is_kept = there & (tl.load(at, mask=there, other=-1) >= 0)
    tl.store(at, block.to(tl.int64) * SIZE + place % SIZE, mask=is_kept)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_VIEWS)
def _verify_kernel(
    rows, targets, kv_lens, num_taken, firsts, heads, drafts, lengths, kept_ids, max_logits, lasts, num_rows,
    MOST: tl.constexpr,
):
    """Count how many drafts of one request came true, which stand in the rows behind its first one."""
    head = tl.load(heads + tl.program_id(0))
    number = tl.arange(0, MOST)
    draft = head + 1 + number
    inside = draft < num_rows
    own = inside & (tl.load(firsts + draft, mask=inside, other=-1) == head)
    taken = tl.load(num_taken + draft, mask=own, other=-1)
    chosen = tl.load(kept_ids + tl.load(targets + draft - 1, mask=own, other=0), mask=own, other=-1)
    guess = tl.load(drafts + draft, mask=own, other=-1)
    is_right = (guess >= 0) & tl.where(taken >= 0, number < taken, chosen == guess)
    is_sound = tl.abs(tl.load(max_logits + draft, mask=own, other=0.0)) < float("inf")
    kept = tl.min(tl.where(own & is_right & is_sound, MOST, number), 0)
    tl.store(lengths + tl.load(rows + head), (tl.load(kv_lens + head) + kept + 1).to(tl.int64))
    tl.store(lasts + tl.program_id(0), head + kept)


@triton.jit(do_not_specialize=["num_requests", "group", "spare_place"], do_not_specialize_on_alignment=_VIEWS)
def _link_kernel(
    lasts, num_wanted, output_positions, targets, positions, kv_lens, tables, numbers, lens,
    num_requests, group, num_groups, num_columns, spare_place, SIZE: tl.constexpr, ROWS: tl.constexpr,
):
    """Of ROWS requests, say where one guess stands, and the slots before it in one group."""
    request = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, number = request < num_requests, tl.program_id(1)
    last = tl.load(lasts + request, mask=there, other=0)
    wanted = tl.load(num_wanted + last, mask=there, other=-1)
    is_live = wanted >= number
    place = tl.where(is_live, tl.load(kv_lens + last, mask=there, other=1) - 1 + number, 0)
    numbers += number * (3 + num_groups) * num_requests + request
    output = tl.load(output_positions + last, mask=there, other=0)
    target = tl.where(wanted > number, tl.load(targets + last, mask=there, other=0) + 1 + number, spare_place)
    position = tl.where(is_live, tl.load(positions + last, mask=there, other=0) + number, 0)
    tl.store(numbers, output + 1 + number, mask=there)
    tl.store(numbers + num_requests, target, mask=there)
    tl.store(numbers + 2 * num_requests, position, mask=there)
    row = (group * num_requests + request).to(tl.int64) * num_columns
    block = tl.load(tables + row + place // SIZE, mask=there, other=0).to(tl.int64)
    slot = tl.where(is_live, block * SIZE + place % SIZE, -1)
    tl.store(numbers + (3 + group) * num_requests, slot, mask=there)
    tl.store(lens + number * num_requests + request, place + 1, mask=there)


@triton.jit(do_not_specialize=["stride"])
def _match_kernel(
    token_ids, rows, lengths, found, stride, LEAST: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr
):
    """Find the best match in one part of a sequence: its length times 2^32, and the place behind it."""
    request, part = tl.program_id(0), tl.program_id(1)
    ids = token_ids + tl.load(rows + request) * stride
    length = tl.load(lengths + request)
    best = tl.zeros((), tl.int64)
    for first in range(part * TILE, length, tl.num_programs(1) * TILE):
        place = first + tl.arange(0, TILE)
        same, number = place < length, tl.zeros((), tl.int32)
        count = tl.zeros((TILE,), tl.int64)
        while (number < MOST) & (tl.max(same.to(tl.int32), 0) > 0):
            same &= place > number
            wanted = tl.load(ids + length - 1 - number)
            same &= tl.load(ids + place - 1 - number, mask=same, other=-1) == wanted
            count += same.to(tl.int64)
            number += 1
        best = tl.maximum(best, tl.max(tl.where(count >= LEAST, count * 4294967296 + place, 0), 0))
    tl.store(found + request * tl.num_programs(1) + part, best)


@triton.jit(do_not_specialize=["stride", "count"])
def _follow_kernel(
    token_ids, rows, lengths, found, guesses, stride, count, PARTS: tl.constexpr, MOST: tl.constexpr
):
    """Copy the tokens behind the best match of all parts."""
    request, number = tl.program_id(0), tl.arange(0, MOST)
    best = tl.max(tl.load(found + request * PARTS + tl.arange(0, PARTS)), 0)
    place, length = best % 4294967296, tl.load(lengths + request)
    place += number % tl.maximum(length - place, 1)
    is_there = (number < count) & (best > 0)
    token_id = tl.load(token_ids + tl.load(rows + request) * stride + place, mask=is_there, other=-1)
    tl.store(guesses + request * count + number, token_id, mask=number < count)
# fmt: on


def move_rows(
    given: ChainRows,
    lengths: Tensor,
    kept_ids: Tensor,
    tables: Tensor,
    block_sizes: Sequence[int],
    ids: Tensor,
) -> None:
    """See chained.MoveRows."""
    counted = given.places, given.rows, given.positions, given.output_positions, given.targets
    written = *counted, given.kv_lens, given.num_known, given.drafts, given.cache_slots
    for group, size in enumerate(block_sizes):
        _move_kernel[(cdiv(len(ids), _ROWS),)](
            *written, lengths, kept_ids, tables, ids, len(ids), group, tables.shape[2],
            SIZE=size, IS_FIRST=group == 0, GUESSED=UNTOLD, ROWS=_ROWS, num_warps=1,
        )  # fmt: skip


def verify_drafts(given: ChainRows, lengths: Tensor, kept_ids: Tensor, max_logits: Tensor) -> Tensor:
    """See chained.VerifyDrafts."""
    lasts = torch.empty_like(given.heads)
    rows = given.rows, given.targets, given.kv_lens, given.num_taken, given.firsts, given.heads, given.drafts
    _verify_kernel[(len(lasts),)](
        *rows, lengths, kept_ids, max_logits, lasts, len(given.rows), MOST=_MOST, num_warps=1
    )
    return lasts


def link_guesses(
    given: ChainRows, lasts: Tensor, tables: Tensor, block_sizes: Sequence[int], count: int, spare_place: int
) -> Ahead:
    """See chained.LinkGuesses."""
    (num_requests,), (num_groups, _, num_columns) = lasts.shape, tables.shape
    numbers = lasts.new_empty(count, 3 + num_groups, num_requests)
    ahead = Ahead(numbers, given.kv_lens.new_empty(count, num_requests))
    rows = given.num_wanted, given.output_positions, given.targets, given.positions, given.kv_lens
    for group, size in enumerate(block_sizes):
        _link_kernel[(cdiv(num_requests, _ROWS), count)](
            lasts, *rows, tables, *ahead, num_requests, group, num_groups, num_columns, spare_place,
            SIZE=size, ROWS=_ROWS, num_warps=1,
        )  # fmt: skip
    return ahead


def look_up(token_ids: Tensor, rows: Tensor, lengths: Tensor, least: int, most: int, count: int) -> Tensor:
    """See chained.LookUp: in parts, side by side."""
    sequences, stride = (token_ids, rows, lengths), token_ids.stride(0)
    found, guesses = rows.new_empty(len(rows), _PARTS), rows.new_empty(len(rows), count)
    _match_kernel[(len(rows), _PARTS)](*sequences, found, stride, LEAST=least, MOST=most, TILE=_TILE)
    _follow_kernel[(len(rows),)](
        *sequences, found, guesses, stride, count, PARTS=_PARTS, MOST=_MOST, num_warps=1
    )
    return guesses


CHAIN_KERNELS = ChainKernels(move_rows, verify_drafts, link_guesses, look_up)
