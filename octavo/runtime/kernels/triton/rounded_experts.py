"""The grouped product of experts in bytes with inputs that are rounded to bytes: FP8 by FP8, int8 by int8.

Tokens are rounded as for one matrix (see `eight_bits`), and so is what the first product makes, pair by pair:
a pair's bits do not depend on its company. Scales multiply sums in the end, or every 128 inputs.
"""

import functools
from typing import Any

import triton
import triton.language as tl

from octavo.runtime.kernels.triton.elementwise import act
from octavo.runtime.kernels.triton.launch import release, stages, wait

_FEW_ROWS = 32  # of a tile, which are the right operand


# fmt: off
@triton.jit
def _add(
    total, a, w, given, own, SWAPPED: tl.constexpr, IN_GROUPS: tl.constexpr, IS_FLOAT: tl.constexpr,
):
    """Add the product of a tile of inputs and one of a matrix, both bytes; IN_GROUPS: times their scales."""
    if SWAPPED:
        left, right = w, tl.trans(a)
    else:
        left, right = a, tl.trans(w)
    if IN_GROUPS:
        product = tl.dot(left, right, out_dtype=tl.float32 if IS_FLOAT else tl.int32).to(tl.float32)
        if SWAPPED:
            total += product * own[:, None] * given[None, :]
        else:
            total += product * (given[:, None] * own[None, :])
    elif not IS_FLOAT:
        total = tl.dot(left, right, total, out_dtype=tl.int32)
    elif SWAPPED:
        total += tl.dot(left, right)
    else:
        total = tl.dot(left, right, total)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def rounded_kernel(
    x, x_scales, weights, pairs, experts, matrix, other, scales, others, bias, out, num_rows,
    E: tl.constexpr, TOP_K: tl.constexpr, N: tl.constexpr, K: tl.constexpr, UP: tl.constexpr,
    STRIDE: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    WEIGHS: tl.constexpr, BIASED: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    IS_FLOAT: tl.constexpr, SWAPPED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, PDL: tl.constexpr, APART: tl.constexpr = False,
):
    """Compute what `_expert_kernel` does for a tile of pairs, of num_rows rows in bytes. TILE_K divides K."""
    IN_GROUPS: tl.constexpr = GROUPS > 1
    tile = tl.program_id(1)
    wait(PDL)
    expert = tl.load(experts + tile)
    if (expert < 0) | (expert >= E):
        return
    pair = tl.load(pairs + tile * TILE_M + tl.arange(0, TILE_M))
    there = pair >= 0
    pair = tl.where(there, pair, 0).to(tl.int64)
    row = pair // TOP_K if UP else pair
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    near = tl.where(n < N, n, 0)  # those beyond are computed, not stored
    column = tl.arange(0, TILE_K)
    inputs = x + row[:, None] * K + column[None, :]
    place = expert.to(tl.int64) * STRIDE + near.to(tl.int64)[:, None] * ROW + column[None, :]
    own = expert * (N // ROWS * GROUPS) + near // ROWS * GROUPS
    if SWAPPED:
        first = tl.zeros([TILE_N, TILE_M], tl.float32 if IS_FLOAT or IN_GROUPS else tl.int32)
    else:
        first = tl.zeros([TILE_M, TILE_N], tl.float32 if IS_FLOAT or IN_GROUPS else tl.int32)
    second = first
    for start in range(0, K, TILE_K):
        a = tl.load(inputs + start, mask=there[:, None], other=0.0)
        w = tl.load(matrix + place + start)
        group = start // 128 if IN_GROUPS else 0
        given = tl.load(x_scales + group * num_rows.to(tl.int64) + row) if IN_GROUPS else 0
        scale = tl.load(scales + own + group) if IN_GROUPS else 0
        first = _add(first, a, w, given, scale, SWAPPED, IN_GROUPS, IS_FLOAT)
        if UP:
            w = tl.load(other + place + start)
            scale = tl.load(others + own + group) if IN_GROUPS else 0
            second = _add(second, a, w, given, scale, SWAPPED, IN_GROUPS, IS_FLOAT)
    release(PDL)
    if SWAPPED:
        first, second = tl.trans(first), tl.trans(second)
    first, second = first.to(tl.float32), second.to(tl.float32)
    if not IN_GROUPS:
        factor = tl.load(x_scales + row)[:, None]
        first *= factor * tl.load(scales + own)[None, :]
        if UP:
            second *= factor * tl.load(others + own)[None, :]
    if WEIGHS and UP:
        weight = tl.load(weights + pair)[:, None]
        first, second = first * weight, second * weight
    finish(
        first, second, pair, there, n, expert, weights, bias, out, N, UP, WEIGHS, BIASED, KIND, LIMIT, ALPHA,
        APART,
    )


@triton.jit
def finish(
    first, second, pair, there, n, expert, weights, bias, out, N: tl.constexpr, UP: tl.constexpr,
    WEIGHS: tl.constexpr, BIASED: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    APART: tl.constexpr,
):
    """Store what a product's sums become: see `complete`."""
    first, second = complete(
        first, second, pair, there, n, expert, weights, bias, N, UP, WEIGHS, BIASED, KIND, LIMIT, ALPHA, APART
    )
    place, mask = pair[:, None] * (2 * N if APART else N) + n[None, :], there[:, None] & (n < N)[None, :]
    if UP and APART:
        tl.store(out + place + N, second, mask=mask)
    tl.store(out + place, first.to(out.dtype.element_ty), mask=mask)


@triton.jit
def complete(
    first, second, pair, there, n, expert, weights, bias, N: tl.constexpr, UP: tl.constexpr,
    WEIGHS: tl.constexpr, BIASED: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    APART: tl.constexpr,
):
    """Return sums with the bias of their expert, activated if UP and not APART, weighed if not UP."""
    if BIASED:
        bias += expert * (2 * N if UP else N)
        first += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if UP:
            second += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if UP and not APART:
        first = activated(first, second, KIND, LIMIT, ALPHA)
    elif not UP and not WEIGHS:
        first *= tl.load(weights + pair, mask=there, other=0.0)[:, None]
    return first, second


@triton.jit
def activated(gate, value, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return what an expert makes of gates and values; see ExpertForm."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        return gate * tl.sigmoid(ALPHA * gate) * (tl.clamp(value, -LIMIT, LIMIT) + 1.0)
    else:  # noqa: RET505  # both branches of a constant are compiled after a return
        return act(gate, KIND) * value
# fmt: on


@functools.cache
def shapes(tile_m: int, k: int, is_pair: bool, in_groups: bool) -> dict[str, Any]:
    """Choose the tile for tile_m pairs, as measured on an H200. is_pair: with gates and values"""
    is_small, is_large = tile_m <= _FEW_ROWS, tile_m > 64
    tile_n = 64 if is_small or is_pair else tile_m if in_groups else 2 * tile_m
    tile_k = 256 if tile_m == 16 and is_pair and not in_groups and k % 256 == 0 else 128
    size = (tile_m + tile_n * (2 if is_pair else 1)) * tile_k
    sizes = {"TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": tile_k, "SWAPPED": is_small}
    return sizes | {"num_warps": 8 if is_large else 4, "num_stages": stages(3, size)}
