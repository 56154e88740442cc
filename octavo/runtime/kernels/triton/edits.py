"""What requests change in their logits: rows in float32, the step's masks as bits, bad words, penalties."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.sampling import IN_PROMPT, TokenLists, Words
from octavo.runtime.kernels.triton.launch import cdiv

_TILE = 4096
_WIDTH = 512
"""Listed tokens of one program."""
_NEVER = tl.constexpr(float("-inf"))
_IN_PROMPT = tl.constexpr(IN_PROMPT)


@triton.jit
def _widen_kernel(logits, out, stride, size, TILE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * stride + column, mask=column < size)
    tl.store(out + row * size + column, values.to(tl.float32), mask=column < size)


def widen(logits: Tensor) -> Tensor:
    """See sampling.Widen."""
    if logits.dtype == torch.float32:
        return logits.contiguous()
    num_rows, size = logits.shape
    out = logits.new_empty(num_rows, size, dtype=torch.float32)
    if num_rows:
        _widen_kernel[(cdiv(size, _TILE), num_rows)](logits, out, logits.stride(0), size, TILE=_TILE)
    return out


@triton.jit
def _forbid_kernel(logits, rows, numbers, words, stride, size, num_words, TILE: tl.constexpr):
    """Write over the forbidden logits of one tile of one row; the others are not read."""
    place = tl.program_id(1)
    row, number = tl.load(rows + place), tl.load(numbers + place)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    word = tl.load(words + number * num_words + column // 32, mask=column < size, other=-1)
    is_forbidden = (word >> (column % 32)) & 1 == 0
    tl.store(logits + row * stride + column, _NEVER, mask=(column < size) & is_forbidden)


def forbid(logits: Tensor, rows: Tensor, numbers: Tensor, words: Tensor) -> None:
    """See sampling.Forbid."""
    size = logits.shape[1]
    if len(rows):
        _forbid_kernel[(cdiv(size, _TILE), len(rows))](
            logits, rows, numbers, words, logits.stride(0), size, words.shape[1], TILE=_TILE
        )


# What a number is divisible by must not decide what is compiled, in the midst of serving.
@triton.jit(do_not_specialize=["ids_stride", "width", "num_words"])
def _ban_kernel(
    logits, rows, last, prefixes, owners, lists, ids, lengths, stride, ids_stride, width, num_words,
    WORDS: tl.constexpr,
):  # fmt: skip
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    there = word < num_words
    output = ids + tl.load(lists + word, mask=there, other=0) * ids_stride
    length = tl.load(lengths + tl.load(owners + word, mask=there, other=0), mask=there, other=0)
    matches = there
    for before in range(width):
        wanted = tl.load(prefixes + word * width + before, mask=there, other=-1)
        column = length - 1 - before
        token = tl.load(output + column, mask=there & (column >= 0), other=-1)
        matches &= (wanted < 0) | (token == wanted)
    place = tl.load(rows + word, mask=there, other=0) * stride + tl.load(last + word, mask=there, other=0)
    tl.store(logits + place, _NEVER, mask=matches)


def ban(logits: Tensor, words: Words, ids: Tensor, lengths: Tensor) -> None:
    """See sampling.Ban."""
    num_words, width = words.prefixes.shape
    if num_words:
        sizes = logits.stride(0), ids.stride(0), width, num_words
        _ban_kernel[(cdiv(num_words, 128),)](logits, *words, ids, lengths, *sizes, WORDS=128)


@triton.jit(do_not_specialize=["ids_stride"])
def _penalize_kernel(
    logits, rows, lists, lengths, ids, counts, owners, strengths, stride, ids_stride, size,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Change WIDTH of the tokens that one row's list holds; none stands there twice."""
    place = tl.program_id(1)
    row, owner = tl.load(rows + place), tl.load(lists + place)
    strengths += tl.load(owners + place) * 3
    entry = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    token = tl.load(ids + owner * ids_stride + entry, mask=entry < tl.load(lengths + place), other=-1)
    there = token >= 0
    mark = tl.load(counts + owner * size + token, mask=there, other=0)
    value = tl.load(logits + row * stride + token, mask=there, other=0.0)
    repetition, frequency, presence = tl.load(strengths), tl.load(strengths + 1), tl.load(strengths + 2)
    count = (mark % _IN_PROMPT).to(tl.float32)
    repeated = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    value = tl.where(mark > 0, repeated, value) - frequency * count
    value -= tl.where(count > 0, presence, 0.0)
    tl.store(logits + row * stride + token, value, mask=there)


def penalize(logits: Tensor, rows: Tensor, lists: TokenLists, owners: Tensor, strengths: Tensor) -> None:
    """See sampling.Penalize."""
    if len(rows):
        tables = lists.rows, lists.lengths, lists.ids, lists.counts
        sizes = logits.stride(0), lists.ids.stride(0), logits.shape[1]
        grid = cdiv(lists.longest, _WIDTH), len(rows)
        _penalize_kernel[grid](logits, rows, *tables, owners, strengths, *sizes, WIDTH=_WIDTH)


@triton.jit(do_not_specialize=["ids_stride", "num_rows"])
def _count_kernel(token_ids, lists, lengths, ids, counts, ids_stride, size, num_rows, ROWS: tl.constexpr):
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = place < num_rows
    token = tl.load(token_ids + place, mask=there, other=0)
    owner, length = tl.load(lists + place, mask=there, other=0), tl.load(lengths + place, mask=there, other=0)
    before = tl.load(counts + owner * size + token, mask=there, other=0)
    tl.store(ids + owner * ids_stride + length, tl.where(before == 0, token, -1), mask=there)
    tl.store(counts + owner * size + token, before + 1, mask=there)


def count(lists: TokenLists, token_ids: Tensor) -> None:
    """See sampling.Count."""
    if num_rows := len(token_ids):
        tables = lists.rows, lists.lengths, lists.ids, lists.counts
        sizes = lists.ids.stride(0), lists.counts.shape[1], num_rows
        _count_kernel[(cdiv(num_rows, 64),)](token_ids, *tables, *sizes, ROWS=64, num_warps=2)
