"""Choosing one token per row in one pass over the logits, by the row's one random number.

A row is cut into tiles of one size, whatever the batch, so that a row's token does not depend on its
neighbours. Every program leaves the largest logit and the weight of each of its tiles; the last one of a row
finds the tile in which the running weight passes the target, and searches that one only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.sampling import Choice, Draws, Truncation
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

_LOG2_E = tl.constexpr(1.4426950408889634)
_TILE = 2048
_NEVER, _FAILED = tl.constexpr(float("-inf")), tl.constexpr(float("inf"))  # the latter for not-a-numbers


@triton.jit
def _weights(values, ids, max_logit, factor, lowest, last_id, TRUNCATED: tl.constexpr):
    """Return what the values weigh beside a largest logit of weight 1; 0 where they are cut off."""
    weights = tl.exp2((values - tl.where(max_logit == _NEVER, 0.0, max_logit)) * factor)
    if TRUNCATED:
        weights = tl.where((values > lowest) | ((values == lowest) & (ids <= last_id)), weights, 0.0)
    return weights


@triton.jit
def _passing(weights, index, target):
    """Return the first index where the running weight exceeds `target`, or the last of any weight."""
    ends = tl.cumsum(weights.to(tl.float64), 0)
    return tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), tl.max(tl.where(weights > 0, index, 0), 0))


# fmt: off
# Where rows of numbers begin depends on their number: it must not decide what is compiled.
@triton.jit(
    do_not_specialize=["per_program"],
    do_not_specialize_on_alignment=["temperature", "noise", "tile_maxima", "tile_weights"],
)
def _draw_kernel(
    logits, temperature, noise, cut_values, cut_ids, token_ids, max_logits,
    tile_maxima, tile_weights, counters, stride, per_program,
    SIZE: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr,
    NUM_TILES_PAD: tl.constexpr, DRAWS: tl.constexpr, TRUNCATED: tl.constexpr, PDL: tl.constexpr,
):
    """Weigh `per_program` tiles of one row; the last program of a row draws."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits += row * stride
    column = tl.arange(0, TILE)
    factor, lowest, last_id = 0.0, 0.0, 0
    wait(PDL)
    if DRAWS:
        degree = tl.load(temperature + row).to(tl.float32)
        factor = tl.where(degree > 0, _LOG2_E / degree, 0.0)
    if TRUNCATED:
        lowest, last_id = tl.load(cut_values + row), tl.load(cut_ids + row)
    for tile in range(part * per_program, tl.minimum((part + 1) * per_program, NUM_TILES)):
        index = tile * TILE + column
        values = tl.load(logits + index, mask=index < SIZE, other=_NEVER).to(tl.float32)
        max_logit = tl.max(tl.where(values == values, values, _FAILED), 0)
        place = row * NUM_TILES + tile
        tl.store(tile_maxima + place, max_logit)
        if DRAWS:
            weights = _weights(values, index, max_logit, factor, lowest, last_id, TRUNCATED)
            tl.store(tile_weights + place, tl.sum(weights, 0))
    if not is_last(counters + row, tl.num_programs(0)):
        return
    release(PDL)
    tile = tl.arange(0, NUM_TILES_PAD)
    there, place = tile < NUM_TILES, row * NUM_TILES + tile
    highest = tl.load(tile_maxima + place, mask=there, other=_NEVER, cache_modifier=".cg")
    max_logit, found = tl.max(highest, 0, return_indices=True, return_indices_tie_break_left=True)
    target = tl.full([], 0.0, tl.float64)
    if DRAWS:  # noqa: SIM102  # a constant
        if factor > 0:
            sums = tl.load(tile_weights + place, mask=there, other=0.0, cache_modifier=".cg")
            sums = sums * _weights(highest, tile, max_logit, factor, lowest, last_id, False)
            target = tl.sum(sums.to(tl.float64), 0) * tl.load(noise + row)
            found = _passing(sums, tile, target)
            target -= tl.sum(tl.where(tile < found, sums, 0.0).to(tl.float64), 0)
    index = found * TILE + column
    values = tl.load(logits + index, mask=index < SIZE, other=_NEVER).to(tl.float32)
    chosen = tl.argmax(values, 0, tie_break_left=True)
    if DRAWS:  # noqa: SIM102
        if factor > 0:
            chosen = _passing(
                _weights(values, index, max_logit, factor, lowest, last_id, TRUNCATED), column, target
            )
    tl.store(token_ids + row, (found * TILE + chosen).to(tl.int64))
    tl.store(max_logits + row, max_logit)
# fmt: on


def draw(
    counters: Counters, logits: Tensor, draws: Draws | None = None, truncation: Truncation | None = None
) -> Choice:
    """See sampling.Draw; the programs of a row meet at one of the counters."""
    num_rows, size = logits.shape
    token_ids = logits.new_empty(num_rows, dtype=torch.int64)
    max_logits = logits.new_empty(num_rows, dtype=torch.float32)
    if not num_rows:
        return Choice(token_ids, max_logits)
    num_tiles = cdiv(size, _TILE)
    per_program = cdiv(num_tiles * num_rows, 2 * NUM_PROGRAMS)
    tiles = logits.new_empty((2, num_rows, num_tiles), dtype=torch.float32)
    given = logits, *(draws or (max_logits, max_logits)), *(truncation or (max_logits, token_ids))
    written = token_ids, max_logits, *tiles, counters.on(logits.device, num_rows)
    sizes = {"SIZE": size, "TILE": _TILE, "NUM_TILES": num_tiles, "NUM_TILES_PAD": power_of_2(num_tiles)}
    kind = {"DRAWS": draws is not None, "TRUNCATED": truncation is not None}
    _draw_kernel[(cdiv(num_tiles, per_program), num_rows)](
        *given, *written, logits.stride(0), per_program, num_warps=4, **sizes, **kind, **overlapped()
    )
    return Choice(token_ids, max_logits)
