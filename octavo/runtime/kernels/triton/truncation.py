"""Where top_k, top_p and min_p end each row's distribution, found without putting the vocabulary in order.

A first kernel takes the largest logit of every small group of tokens. In a second one, a program per row
finds a logit that some hundred of these reach: all tokens as likely lie in their groups, few enough to be
kept in registers, and the ends are found among them by bisection. In a row whose end lies deeper a quarter of
what is left is found in every pass over its vocabulary. The search goes over the bits that numbers of the
logits' type have, so it ends at the exact logit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.sampling import Limits, Truncation
from octavo.runtime.kernels.triton.launch import cdiv, overlapped, power_of_2, release, wait

_LOG2_E = tl.constexpr(1.4426950408889634)
_NEVER = tl.constexpr(float("-inf"))
_TILE, _GROUP = 2048, 32  # tokens
_NUM_REACHED, _MAX_CHOSEN = 256, 512  # groups
_LOW_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Of float32, which are 0 in every number of the type."""
_PER_ROW = ["temperature", "top_k", "top_p", "min_p"]
"""Where these begin depends on the number of rows: it must not decide what is compiled."""


@triton.jit
def _key(values):
    """Return integers in the order of the values; the two zeros are one."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


@triton.jit
def _value(key):
    key = key.to(tl.int32)
    return tl.where(key >= 0, key, (-key) | -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def _step(values, LOW: tl.constexpr):
    """Return the same without the bits that no value has; between two values, the upper one's."""
    return -((-_key(values)) >> LOW)


@triton.jit
def _is_cut(top_k, top_p, min_p, row):
    return (tl.load(top_k + row) >= 1) | (tl.load(top_p + row) < 1) | (tl.load(min_p + row) > 0)


# fmt: off
@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _group_kernel(
    logits, temperature, top_k, top_p, min_p, group_maxima, tile_weights, stride,
    SIZE: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, NUM_TILES: tl.constexpr, PDL: tl.constexpr,
):
    """Reduce the groups of one tile of one row, and the tile's weight beside a largest logit of weight 1."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait(PDL)
    if _is_cut(top_k, top_p, min_p, row):
        group: tl.constexpr = TILE // GROUP
        index = tile * TILE + tl.arange(0, group)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        values = tl.load(logits + row * stride + index, mask=index < SIZE, other=_NEVER).to(tl.float32)
        maxima = tl.max(values, 1)
        place = row * NUM_TILES + tile
        tl.store(group_maxima + place * group + tl.arange(0, group), maxima)
        top = tl.max(maxima, 0)
        factor = _LOG2_E / tl.load(temperature + row).to(tl.float32)
        weights = tl.exp2((values - tl.where(top == _NEVER, 0.0, top)) * factor)
        tl.store(tile_weights + place, tl.sum(tl.sum(weights, 1), 0))
    release(PDL)


@triton.jit
def _over(
    logits, least, second, third, top, factor, SIZE: tl.constexpr, TILE: tl.constexpr, LOW: tl.constexpr
):
    """Return (number, weight) of the tokens of a whole row that reach each of three steps."""
    column = tl.arange(0, TILE)
    number_1, weight_1 = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.float32)
    number_2, weight_2, number_3, weight_3 = number_1, weight_1, number_1, weight_1
    for start in range(0, SIZE, TILE):
        index = start + column
        values = tl.load(logits + index, mask=index < SIZE, other=_NEVER).to(tl.float32)
        weight, step = tl.exp2((values - top) * factor), _step(values, LOW)
        step = tl.where(index < SIZE, step, -0x80000000)
        number_1 += (step >= least).to(tl.int32)
        number_2 += (step >= second).to(tl.int32)
        number_3 += (step >= third).to(tl.int32)
        weight_1 += tl.where(step >= least, weight, 0.0)
        weight_2 += tl.where(step >= second, weight, 0.0)
        weight_3 += tl.where(step >= third, weight, 0.0)
    return (
        tl.sum(number_1, 0),
        tl.sum(weight_1, 0),
        tl.sum(number_2, 0),
        tl.sum(weight_2, 0),
        tl.sum(number_3, 0),
        tl.sum(weight_3, 0),
    )


@triton.jit
def _among(keys, weights, least):
    kept = keys >= least
    return tl.sum(tl.sum(kept.to(tl.int32), 1), 0), tl.sum(tl.sum(tl.where(kept, weights, 0.0), 1), 0)


@triton.jit
def _search(
    low, high, number, weight, keys, weights, is_among, logits, top, factor,
    SIZE: tl.constexpr, TILE: tl.constexpr, LOW: tl.constexpr,
):
    """Find the largest step that `number` tokens and `weight` reach; `low` is known to be one."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        if is_among:
            has_number, has_weight = _among(keys, weights, middle.to(tl.int32))
            if (has_number >= number) & (has_weight >= weight):
                low = middle
            else:
                high = middle
        else:
            first, third = (low + middle) >> 1, (middle + high) >> 1
            n_1, w_1, n_2, w_2, n_3, w_3 = _over(
                logits, first.to(tl.int32), middle.to(tl.int32), third.to(tl.int32), top, factor,
                SIZE, TILE, LOW,
            )
            if (n_2 >= number) & (w_2 >= weight):
                is_reached = (n_3 >= number) & (w_3 >= weight)
                low, high = tl.where(is_reached, third, middle), tl.where(is_reached, high, third)
            else:
                is_reached = (n_1 >= number) & (w_1 >= weight)
                low, high = tl.where(is_reached, first, low), tl.where(is_reached, middle, first)
    return low.to(tl.int32)


@triton.jit
def _choose_groups(
    maxima, groups, chosen, high,
    NUM: tl.constexpr, MOST: tl.constexpr, SIZE: tl.constexpr, LOW: tl.constexpr,
):
    """Return a step that the maxima of NUM groups reach, or all; write these, in order, to `chosen`."""
    keys = _step(maxima, LOW)
    low, high = tl.min(keys, 0).to(tl.int64), high.to(tl.int64)
    if tl.sum((keys >= low.to(tl.int32)).to(tl.int32), 0) > NUM:
        while high - low > 1:
            middle = (low + high) >> 1
            if tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0) >= NUM:
                low = middle
            else:
                high = middle
    low = low.to(tl.int32)
    reached = (keys >= low) & (groups < SIZE)
    place = tl.cumsum(reached.to(tl.int32), 0) - 1
    tl.store(chosen + place, groups, mask=reached & (place < MOST))
    tl.debug_barrier()
    return low, tl.sum(reached.to(tl.int32), 0)


@triton.jit
def _nth_id(logits, key, number, SIZE: tl.constexpr, TILE: tl.constexpr, LOW: tl.constexpr):
    column = tl.arange(0, TILE)
    start, found = 0, SIZE
    before = number * 0
    while (start < SIZE) & (found == SIZE):
        index = start + column
        values = tl.load(logits + index, mask=index < SIZE, other=_NEVER).to(tl.float32)
        equal = ((_step(values, LOW) == key) & (index < SIZE)).to(tl.int32)
        ranks = tl.cumsum(equal, 0) + before
        found = tl.min(tl.where((equal > 0) & (ranks == number), index, SIZE), 0)
        before += tl.sum(equal, 0)
        start += TILE
    return found


@triton.jit
def _end_of_mass(
    target, least, above, keys, weights, reached, is_all, logits, top, factor,
    SIZE: tl.constexpr, TILE: tl.constexpr, LOW: tl.constexpr,
):
    """Return (step, id) of the last token needed for a weight of `target`, not below the step `least`."""
    low = tl.maximum(least, reached)
    number, weight = _among(keys, weights, low)
    is_among = is_all & (weight >= target)
    low = tl.where(is_among, low, least)
    least = _search(low, above, 1, target, keys, weights, is_among, logits, top, factor, SIZE, TILE, LOW)
    if is_among:
        with_ties, weight = _among(keys, weights, least)
        number, weight = _among(keys, weights, least + 1)
    else:
        with_ties, _, number, weight, _, _ = _over(
            logits, least, least + 1, least + 1, top, factor, SIZE, TILE, LOW
        )
    needed = tl.ceil((target - weight) / tl.exp2((_value(least << LOW) - top) * factor)).to(tl.int32)
    last_id = tl.full([], SIZE, tl.int32)
    if needed < with_ties - number:
        last_id = _nth_id(logits, least, tl.maximum(needed, 1), SIZE, TILE, LOW)
    return least, last_id


@triton.jit
def _chosen_values(
    logits, chosen, num_chosen, SIZE: tl.constexpr, GROUP: tl.constexpr, MAX_CHOSEN: tl.constexpr
):
    """Load the chosen groups of a row: [MAX_CHOSEN, GROUP]."""
    group = tl.arange(0, MAX_CHOSEN)
    there = group < num_chosen
    index = tl.load(chosen + group, mask=there, other=0)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(logits + index, mask=there[:, None] & (index < SIZE), other=_NEVER).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _cut_kernel(
    logits, temperature, top_k, top_p, min_p, group_maxima, tile_weights, chosen, values_out, ids_out, stride,
    SIZE: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, NUM_TILES: tl.constexpr,
    NUM_TILES_PAD: tl.constexpr, NUM_REACHED: tl.constexpr, MAX_CHOSEN: tl.constexpr, LOW: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    if not _is_cut(top_k, top_p, min_p, row):
        tl.store(values_out + row, _NEVER)
        tl.store(ids_out + row, SIZE)
        return
    logits += row * stride
    chosen += row * MAX_CHOSEN
    per_tile: tl.constexpr = TILE // GROUP
    num_groups: tl.constexpr = NUM_TILES * per_tile
    groups = tl.arange(0, NUM_TILES_PAD * per_tile)
    maxima = tl.load(group_maxima + row * num_groups + groups, mask=groups < num_groups, other=_NEVER)
    top = tl.max(maxima, 0)
    factor = _LOG2_E / tl.load(temperature + row).to(tl.float32)
    above = _step(top, LOW) + 1
    reached, num_chosen = _choose_groups(
        maxima, groups, chosen, above, NUM_REACHED, MAX_CHOSEN, num_groups, LOW
    )
    values = _chosen_values(logits, chosen, num_chosen, SIZE, GROUP, MAX_CHOSEN)
    keys, weights = _step(values, LOW), tl.exp2((values - top) * factor)
    is_all = num_chosen <= MAX_CHOSEN  # every token that reaches the step is among the chosen
    num_among, total = _among(keys, weights, reached)

    least = _step(tl.full([], _NEVER, tl.float32), LOW)
    number = tl.minimum(tl.load(top_k + row), SIZE).to(tl.int32)
    if number >= 1:
        is_among = is_all & (num_among >= number)
        low = tl.where(is_among, reached, least)
        least = _search(
            low, above, number, 0.0, keys, weights, is_among, logits, top, factor, SIZE, TILE, LOW
        )
    share = tl.load(min_p + row).to(tl.float32)
    if share > 0:
        least = tl.maximum(least, _step(top + tl.log2(share) / factor, LOW))
    last_id = tl.full([], SIZE, tl.int32)
    mass = tl.load(top_p + row).to(tl.float32)
    if mass < 1:
        if is_all & (least >= reached):
            number, total = _among(keys, weights, least)
        elif (number >= 1) | (share > 0):
            number, total, _, _, _, _ = _over(logits, least, least, least, top, factor, SIZE, TILE, LOW)
        else:
            tile = tl.arange(0, NUM_TILES_PAD)
            tile_maxima = tl.max(tl.reshape(maxima, [NUM_TILES_PAD, per_tile]), 1)
            sums = tl.load(tile_weights + row * NUM_TILES + tile, mask=tile < NUM_TILES, other=0.0)
            total = tl.sum(sums * tl.exp2((tile_maxima - top) * factor), 0)
        least, last_id = _end_of_mass(
            mass * total, least, above, keys, weights, reached, is_all, logits, top, factor, SIZE, TILE, LOW
        )
    release(PDL)
    tl.store(values_out + row, _value(least << LOW))
    tl.store(ids_out + row, last_id)
# fmt: on


def truncate(logits: Tensor, limits: Limits) -> Truncation:
    """See sampling.FindTruncation."""
    num_rows, size = logits.shape
    values = logits.new_empty(num_rows, dtype=torch.float32)
    ids = logits.new_empty(num_rows, dtype=torch.int32)
    if not num_rows:
        return Truncation(values, ids)
    num_tiles = cdiv(size, _TILE)
    group_maxima = logits.new_empty((num_rows, num_tiles, _TILE // _GROUP), dtype=torch.float32)
    tile_weights = logits.new_empty((num_rows, num_tiles), dtype=torch.float32)
    chosen = logits.new_empty((num_rows, _MAX_CHOSEN), dtype=torch.int32)
    row = logits, *limits, group_maxima, tile_weights
    sizes = {"SIZE": size, "TILE": _TILE, "GROUP": _GROUP, "NUM_TILES": num_tiles}
    _group_kernel[(num_tiles, num_rows)](*row, logits.stride(0), num_warps=4, **sizes, **overlapped())
    sizes |= {"NUM_TILES_PAD": power_of_2(num_tiles), "NUM_REACHED": _NUM_REACHED}
    sizes |= {"MAX_CHOSEN": _MAX_CHOSEN, "LOW": _LOW_BITS[logits.dtype]}
    _cut_kernel[(num_rows,)](
        *row, chosen, values, ids, logits.stride(0), num_warps=16, **sizes, **overlapped()
    )
    return Truncation(values, ids)
