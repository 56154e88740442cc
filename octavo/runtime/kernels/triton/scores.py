"""Logprobs of chosen tokens and of the most likely ones, in one pass over logits of any type.

Every program reduces a tile of a row: its largest logit, its weight, how many are above the chosen token's,
and its most likely tokens; another kernel merges the tiles of each row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels import choice
from octavo.runtime.kernels.sampling import Scored, Scores
from octavo.runtime.kernels.triton.launch import cdiv, power_of_2
from octavo.runtime.kernels.triton.truncation import _key, _value

_TILE = 4096
_MOST = 32
"""Tokens beside the chosen one; more are found by sorting."""
_LOG2_E, _LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
_NEVER = tl.constexpr(float("-inf"))
_TAKEN = tl.constexpr(-(2**31))
"""A key below that of every number."""


@triton.jit
def _tile_kernel(
    logits, rows, token_ids, parts, keys_out, ids_out, stride, num_top,
    SIZE: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    tile, place = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + place)
    column = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * stride + column, mask=column < SIZE, other=_NEVER).to(tl.float32)
    chosen = tl.load(logits + row * stride + tl.load(token_ids + place)).to(tl.float32)
    top = tl.max(values, 0)
    weight = tl.sum(tl.exp2((values - tl.where(top == _NEVER, 0.0, top)) * _LOG2_E), 0)
    out = place * NUM_TILES + tile
    tl.store(parts + out * 3, top)
    tl.store(parts + out * 3 + 1, weight)
    tl.store(parts + out * 3 + 2, tl.sum((values > chosen).to(tl.int32), 0).to(tl.float32))
    keys = tl.where(column < SIZE, _key(values), _TAKEN)
    for number in range(num_top):
        key, best = tl.max(keys, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(keys_out + out * MOST + number, key)
        tl.store(ids_out + out * MOST + number, tile * TILE + best)
        keys = tl.where(column == tile * TILE + best, _TAKEN, keys)


@triton.jit
def _merge_kernel(
    logits, rows, token_ids, parts, keys, ids, ids_out, values_out, ranks_out, stride, num_top,
    NUM_TILES: tl.constexpr, NUM_TILES_PAD: tl.constexpr, MOST: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """Merge the tiles of one row: the chosen token first, then the most likely, of equal ones by id."""
    place = tl.program_id(0)
    tile = tl.arange(0, NUM_TILES_PAD)
    there, part = tile < NUM_TILES, (place * NUM_TILES + tile) * 3
    tops = tl.load(parts + part, mask=there, other=_NEVER)
    top = tl.max(tops, 0)
    shift = 0.0
    if NORMALISE:
        base = tl.where(top == _NEVER, 0.0, top)
        weights = tl.load(parts + part + 1, mask=there, other=0.0)
        total = tl.sum(tl.where(tops == _NEVER, 0.0, weights * tl.exp2((tops - base) * _LOG2_E)), 0)
        shift = base + tl.log2(total) * _LN_2
    token_id = tl.load(token_ids + place)
    chosen = tl.load(logits + tl.load(rows + place) * stride + token_id).to(tl.float32)
    out = place * (1 + num_top)
    tl.store(ids_out + out, token_id)
    tl.store(values_out + out, chosen - shift)
    above = tl.sum(tl.load(parts + part + 2, mask=there, other=0.0), 0)
    tl.store(ranks_out + out, 1 + above.to(tl.int64))
    entry = tl.arange(0, NUM_TILES_PAD * MOST)
    found = (entry < NUM_TILES * MOST) & (entry % MOST < num_top)
    left = tl.load(keys + place * NUM_TILES * MOST + entry, mask=found, other=_TAKEN)
    for number in range(num_top):
        key, best = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(ids_out + out + 1 + number, tl.load(ids + place * NUM_TILES * MOST + best).to(tl.int64))
        tl.store(values_out + out + 1 + number, _value(key) - shift)
        tl.store(ranks_out + out + 1 + number, number + 1)
        left = tl.where(entry == best, _TAKEN, left)


def score(logits: Tensor, scored: Scored) -> Scores:
    """See sampling.Score."""
    rows, token_ids, num_top, normalise, listed_ids = scored
    num_rows, size = len(rows), logits.shape[1]
    if listed_ids is not None or not 0 <= num_top <= min(_MOST, size) or not num_rows:
        return choice.score(logits, scored)
    num_tiles = cdiv(size, _TILE)
    parts = logits.new_empty(num_rows, num_tiles, 3, dtype=torch.float32)
    keys = logits.new_empty(num_rows, num_tiles, _MOST, dtype=torch.int32)
    ids = torch.empty_like(keys)
    found = Scores(
        logits.new_empty(num_rows, 1 + num_top, dtype=torch.int64),
        logits.new_empty(num_rows, 1 + num_top, dtype=torch.float32),
        logits.new_empty(num_rows, 1 + num_top, dtype=torch.int64),
    )
    given = logits, rows, token_ids, parts, keys, ids
    _tile_kernel[(num_tiles, num_rows)](
        *given, logits.stride(0), num_top, SIZE=size, TILE=_TILE, NUM_TILES=num_tiles, MOST=_MOST
    )
    tiles = {"NUM_TILES": num_tiles, "NUM_TILES_PAD": power_of_2(num_tiles), "MOST": _MOST}
    _merge_kernel[(num_rows,)](*given, *found, logits.stride(0), num_top, NORMALISE=normalise, **tiles)
    return found
