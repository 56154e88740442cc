"""Where top_k, top_p and min_p end each row's distribution, found without putting the vocabulary in order.

A first kernel takes the largest logit of every small group of tokens. In a second one, a program per row
finds a logit that some hundred of these reach: all tokens as likely lie in their groups, few enough to be
kept in registers, and the ends are found among them by bisection. A row whose end lies deeper is passed over
as a whole, first around where other groups, taken all over it, let expect the end; each further pass leaves a
quarter. The search goes over the bits that numbers of the logits' type have, so it ends at the exact logit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.sampling import Limits, Truncation
from octavo.runtime.kernels.triton.launch import cdiv, overlapped, power_of_2, release, wait

_LOG2_E = tl.constexpr(1.4426950408889634)
_NEVER = tl.constexpr(float("-inf"))
_TILE, _GROUP = tl.constexpr(4096), tl.constexpr(32)  # tokens
_PER_TILE, _NUM_REACHED, _MAX_CHOSEN = tl.constexpr(128), tl.constexpr(128), tl.constexpr(256)  # groups
_SLACK = tl.constexpr(0.02)
"""Of the weight of what is not chosen: the groups by which an end is guessed tell no better."""
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
    SIZE: tl.constexpr, NUM_TILES: tl.constexpr, PDL: tl.constexpr,
):
    """Reduce the groups of one tile of one row, and the tile's weight beside a largest logit of weight 1."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait(PDL)
    if _is_cut(top_k, top_p, min_p, row):
        group = tile * _PER_TILE + tl.arange(0, _PER_TILE)
        index = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        values = tl.load(logits + row * stride + index, mask=index < SIZE, other=_NEVER).to(tl.float32)
        maxima = tl.max(values, 1)
        tl.store(group_maxima + row * NUM_TILES * _PER_TILE + group, maxima)
        top = tl.max(maxima, 0)
        factor = _LOG2_E / tl.load(temperature + row).to(tl.float32)
        weights = tl.exp2((values - tl.where(top == _NEVER, 0.0, top)) * factor)
        tl.store(tile_weights + row * NUM_TILES + tile, tl.sum(tl.sum(weights, 1), 0))
    release(PDL)


@triton.jit
def _bound(step, LOW: tl.constexpr):
    """Return the least value of a step."""
    return _value(step << LOW)


@triton.jit
def _among(values, weights, step, LOW: tl.constexpr):
    """Return what those of the values weigh that reach a step."""
    return tl.sum(tl.where(values >= _bound(step, LOW), weights, 0.0), 0)


@triton.jit
def _in_row(logits, step_1, step_2, step_3, top, factor, SIZE: tl.constexpr, LOW: tl.constexpr):
    """Return the same of a whole row, for three steps. Several tiles are on their way at once."""
    column, sum_1 = tl.arange(0, _TILE), tl.zeros([_TILE], tl.float32)
    sum_2, sum_3 = sum_1, sum_1
    bound_1, bound_2, bound_3 = _bound(step_1, LOW), _bound(step_2, LOW), _bound(step_3, LOW)
    for start in range(0, SIZE, 4 * _TILE):
        for part in tl.static_range(4):
            index = start + part * _TILE + column
            values = tl.load(logits + index, mask=index < SIZE, other=_NEVER).to(tl.float32)
            weights = tl.exp2((values - top) * factor)
            sum_1 += tl.where(values >= bound_1, weights, 0.0)
            sum_2 += tl.where(values >= bound_2, weights, 0.0)
            sum_3 += tl.where(values >= bound_3, weights, 0.0)
    return tl.sum(sum_1, 0), tl.sum(sum_2, 0), tl.sum(sum_3, 0)


@triton.jit
def _quarters(low, high):
    """Return three steps between two others, some of them equal where there are fewer."""
    middle = (low + high) >> 1
    return tl.maximum((low + middle) >> 1, low + 1), middle, (middle + high) >> 1


@triton.jit
def _narrow(low, high, over, target, step_1, step_2, step_3, sum_1, sum_2, sum_3):
    """Return the steps next to each other between which the target is reached, and the upper one's sum."""
    reach_1, reach_2, reach_3 = sum_1 >= target, sum_2 >= target, sum_3 >= target
    low = tl.where(reach_3, step_3, tl.where(reach_2, step_2, tl.where(reach_1, step_1, low)))
    over = tl.where(reach_3, over, tl.where(reach_2, sum_3, tl.where(reach_1, sum_2, sum_1)))
    high = tl.where(reach_3, high, tl.where(reach_2, step_3, tl.where(reach_1, step_2, step_1)))
    return low, high, over


@triton.jit
def _find(values, weights, low, high, target, LOW: tl.constexpr):
    """Return the largest step whose values weigh `target`, and what weighs more; `low` is known to be one."""
    over = tl.zeros([], tl.float32)
    while high - low > 1:
        middle = (low + high) >> 1
        weight = _among(values, weights, middle, LOW)
        reaches = weight >= target
        low, high = tl.where(reaches, middle, low), tl.where(reaches, high, middle)
        over = tl.where(reaches, over, weight)
    return low, over


@triton.jit
def _find_in_row(
    logits, low, high, over, target, total, top, factor,
    SIZE: tl.constexpr, NUM: tl.constexpr, LOW: tl.constexpr,
):
    """Do so in a row of weight `total`, of which `over` reaches `high`. Some groups tell where to look."""
    groups = tl.arange(0, _MAX_CHOSEN) * NUM // _MAX_CHOSEN
    ids = tl.ravel(groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :])
    values = tl.load(logits + ids, mask=ids < SIZE, other=_NEVER).to(tl.float32)
    inside = (values > _bound(low, LOW)) & (values < _bound(high, LOW))
    weights = tl.where(inside, tl.exp2((values - top) * factor), 0.0)
    seen = tl.sum(weights, 0)
    expected = (target - over) / (total - over)
    step_1, _ = _find(values, weights, low, high, (expected + _SLACK) * seen, LOW)
    step_3, _ = _find(values, weights, low, high, (expected - _SLACK) * seen, LOW)
    step_1 = tl.minimum(tl.maximum(step_1, low + 1), high - 1)
    step_3 = tl.minimum(tl.maximum(step_3 + 1, step_1), high - 1)
    step_2 = (step_1 + step_3) >> 1
    while high - low > 1:
        sum_1, sum_2, sum_3 = _in_row(logits, step_1, step_2, step_3, top, factor, SIZE, LOW)
        low, high, over = _narrow(low, high, over, target, step_1, step_2, step_3, sum_1, sum_2, sum_3)
        step_1, step_2, step_3 = _quarters(low, high)
    return low, over


@triton.jit
def _choose_groups(maxima, groups, chosen, high, NUM: tl.constexpr, LOW: tl.constexpr):
    """Return a step that enough maxima reach, or all that are not -inf; write their groups to `chosen`."""
    low = _step(tl.min(tl.where(groups < NUM, maxima, float("inf")), 0), LOW).to(tl.int64)
    low, _ = _find(maxima, 1.0, low, high, _NUM_REACHED * 1.0, LOW)
    low = tl.maximum(low, _step(tl.full([], _NEVER, tl.float32), LOW).to(tl.int64) + 1)
    reached = (maxima >= _bound(low, LOW)) & (groups < NUM)
    place = tl.cumsum(reached.to(tl.int32), 0) - 1
    tl.store(chosen + place, groups, mask=reached & (place < _MAX_CHOSEN))
    tl.debug_barrier()
    return low, tl.sum(reached.to(tl.int32), 0)


@triton.jit
def _read_groups(logits, chosen, number, SIZE: tl.constexpr):
    """Return (ids, values) of the tokens of the first of the chosen groups of a row, one after the other."""
    place = tl.arange(0, _MAX_CHOSEN)
    there = place < number
    groups = tl.load(chosen + place, mask=there, other=0)
    ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    values = tl.load(logits + ids, mask=there[:, None] & (ids < SIZE), other=_NEVER).to(tl.float32)
    return tl.ravel(ids), tl.ravel(values)


@triton.jit
def _nth_id(logits, value, number, SIZE: tl.constexpr):
    """Return the id of the n-th token of a value, or SIZE."""
    column = tl.arange(0, 4 * _TILE)
    start, found, before = 0, SIZE, number * 0
    while (start < SIZE) & (before < number):
        index = start + column
        values = tl.load(logits + index, mask=index < SIZE, other=_NEVER).to(tl.float32)
        equal = ((values == value) & (index < SIZE)).to(tl.int32)
        count = tl.sum(equal, 0)
        if before + count >= number:
            ranks = tl.cumsum(equal, 0) + before
            found = tl.min(tl.where((equal > 0) & (ranks == number), index, SIZE), 0)
        before += count
        start += 4 * _TILE
    return found


@triton.jit
def _last_id(values, ids, is_among, step, rest, logits, top, factor, SIZE: tl.constexpr, LOW: tl.constexpr):
    """Return the last token of a step that is needed for the rest of the weight, or SIZE for all."""
    value, last_id = _bound(step, LOW), tl.full([], SIZE, tl.int32)
    needed = tl.maximum(tl.ceil(rest / tl.exp2((value - top) * factor)).to(tl.int32), 1)
    if is_among:
        equal = (values == value).to(tl.int32)
        if needed < tl.sum(equal, 0):
            last_id = tl.min(tl.where((equal > 0) & (tl.cumsum(equal, 0) == needed), ids, SIZE), 0)
    else:
        last_id = _nth_id(logits, value, needed, SIZE)
    return last_id


@triton.jit
def _end(
    values, weights, least, reached, above, found, target, total, is_all, has_all, logits, top, factor,
    SIZE: tl.constexpr, NUM: tl.constexpr, LOW: tl.constexpr,
):
    """Return what `_find` does, and if that was among the chosen, of which `found` reaches both steps."""
    is_among = is_all & ((found >= target) | has_all)
    if is_among:
        low = tl.where(found >= target, tl.maximum(least, reached), least)
        least, over = _find(values, weights, low, above, target, LOW)
    else:
        high, over = tl.where(is_all, reached, above), tl.where(is_all, found, 0.0)
        least, over = _find_in_row(logits, least, high, over, target, total, top, factor, SIZE, NUM, LOW)
    return least, over, is_among


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _cut_kernel(
    logits, temperature, top_k, top_p, min_p, group_maxima, tile_weights, chosen, values_out, ids_out, stride,
    SIZE: tl.constexpr, NUM_TILES: tl.constexpr, NUM_TILES_PAD: tl.constexpr, LOW: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_groups: tl.constexpr = NUM_TILES * _PER_TILE
    wait(PDL)
    if not _is_cut(top_k, top_p, min_p, row):
        tl.store(values_out + row, _NEVER)
        tl.store(ids_out + row, SIZE)
        return
    logits += row * stride
    chosen += row * _MAX_CHOSEN
    groups, tile = tl.arange(0, NUM_TILES_PAD * _PER_TILE), tl.arange(0, NUM_TILES_PAD)
    maxima = tl.load(group_maxima + row * num_groups + groups, mask=groups < num_groups, other=_NEVER)
    sums = tl.load(tile_weights + row * NUM_TILES + tile, mask=tile < NUM_TILES, other=0.0)
    top = tl.max(maxima, 0)
    factor = _LOG2_E / tl.load(temperature + row).to(tl.float32)
    tile_maxima = tl.max(tl.reshape(maxima, [NUM_TILES_PAD, _PER_TILE]), 1)
    total = tl.sum(sums * tl.exp2((tile_maxima - top) * factor), 0)
    above = _step(top, LOW).to(tl.int64) + 1
    reached, num_chosen = _choose_groups(maxima, groups, chosen, above, num_groups, LOW)
    ids, values = _read_groups(logits, chosen, num_chosen, SIZE)
    is_all = num_chosen <= _MAX_CHOSEN  # every token that reaches the step is among the chosen
    least = _step(tl.full([], _NEVER, tl.float32), LOW).to(tl.int64)
    has_all = reached == least + 1  # every token that may be drawn is

    number = tl.minimum(tl.load(top_k + row), SIZE).to(tl.float32)
    if number >= 1:
        found = _among(values, 1.0, reached, LOW)
        least, _, _ = _end(
            values, 1.0, least, reached, above, found, number, SIZE * 1.0, is_all, has_all,
            logits, top, 0.0, SIZE, num_groups, LOW,
        )
    share = tl.load(min_p + row).to(tl.float32)
    if share > 0:
        least = tl.maximum(least, _step(top + tl.log2(share) / factor, LOW).to(tl.int64))
    last_id = tl.full([], SIZE, tl.int32)
    mass = tl.load(top_p + row).to(tl.float32)
    if mass < 1:
        low, weights = tl.maximum(least, reached), tl.exp2((values - top) * factor)
        found = _among(values, weights, low, LOW)
        if is_all & ((least >= reached) | has_all):
            total = found
        elif (number >= 1) | (share > 0):
            total, _, _ = _in_row(logits, least, least, least, top, factor, SIZE, LOW)
        target = mass * total
        least, over, is_among = _end(
            values, weights, least, reached, above, found, target, total, is_all, has_all,
            logits, top, factor, SIZE, num_groups, LOW,
        )
        last_id = _last_id(values, ids, is_among, least, target - over, logits, top, factor, SIZE, LOW)
    release(PDL)
    tl.store(values_out + row, _bound(least, LOW))
    tl.store(ids_out + row, last_id)
# fmt: on


def truncate(logits: Tensor, limits: Limits) -> Truncation:
    """See sampling.FindTruncation."""
    num_rows, size = logits.shape
    values, ids = (logits.new_empty(num_rows, dtype=kind) for kind in (torch.float32, torch.int32))
    if not num_rows:
        return Truncation(values, ids)
    num_tiles = cdiv(size, _TILE.value)
    group_maxima = logits.new_empty((num_rows, num_tiles, _PER_TILE.value), dtype=torch.float32)
    tile_weights = logits.new_empty((num_rows, num_tiles), dtype=torch.float32)
    chosen = logits.new_empty((num_rows, _MAX_CHOSEN.value), dtype=torch.int32)
    row, how = (logits, *limits, group_maxima, tile_weights), overlapped()
    _group_kernel[(num_tiles, num_rows)](*row, logits.stride(0), size, num_tiles, num_warps=8, **how)
    sizes = size, num_tiles, power_of_2(num_tiles), _LOW_BITS[logits.dtype]
    how = how | ({"maxnreg": 128} if how["PDL"] else {})  # so two rows are searched at once on a processor
    _cut_kernel[(num_rows,)](*row, chosen, values, ids, logits.stride(0), *sizes, num_warps=8, **how)
    return Truncation(values, ids)
