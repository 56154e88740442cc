"""A choice of experts per token, and tokens sorted by expert into tiles.

Nothing waits for the device: the host knows how many tiles there can be at most, and programs of tiles that
are not there return at once, so that a step can be captured. Few tokens are not sorted: a program takes one
token and one of its experts. Ids that are none (while kernels are compiled) harm nothing.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.experts import Router, Routing
from octavo.runtime.kernels.triton.launch import (
    cdiv,
    has_matrix_units,
    has_warp_groups,
    overlapped,
    power_of_2,
    release,
    stages,
    wait,
)

_SCORES = {"softmax": 0, "sigmoid": 1, "logits": 2}
_FEW_PAIRS = 64  # of tokens and experts, that are not sorted
_MANY_ROUNDED = 512  # of an expert, from which on the largest tiles are faster
_SORTED_AT_ONCE = 1024


# fmt: off
@triton.jit
def _best(values, ids, NONE: tl.constexpr):
    """Return the largest of all values, and the lowest id that has it."""
    top = tl.max(tl.max(values, 1), 0)
    return top, tl.min(tl.min(tl.where(values == top, ids, NONE), 1), 0)


@triton.jit
def _route_kernel(
    logits, bias, ids, weights, stride, epsilon, factor,
    E: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, GROUPS: tl.constexpr, G_PAD: tl.constexpr,
    S_PAD: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr, SCORES: tl.constexpr,
    BIASED: tl.constexpr, NORMALISES: tl.constexpr, PDL: tl.constexpr,
):
    """Choose the experts of one token. Groups are rows, their experts columns."""
    wait(PDL)
    release(PDL)
    SIZE: tl.constexpr = E // GROUPS
    LOWEST: tl.constexpr = float("-inf")
    token = tl.program_id(0).to(tl.int64)
    g, s, k = tl.arange(0, G_PAD), tl.arange(0, S_PAD), tl.arange(0, K_PAD)
    expert = g[:, None] * SIZE + s[None, :]
    there = (g < GROUPS)[:, None] & (s < SIZE)[None, :]
    score = tl.load(logits + token * stride + expert, mask=there, other=0.0).to(tl.float32)
    finite = tl.sum(tl.sum(tl.where(tl.abs(score) < float("inf"), 0, 1), 1), 0) == 0
    score = tl.where(finite, score, 0.0)
    if SCORES == 0:
        top = tl.max(tl.max(tl.where(there, score, LOWEST), 1), 0)
        score = tl.where(there, tl.exp(score - top), 0.0)
        score /= tl.sum(tl.sum(score, 1), 0)
    if SCORES == 1:
        score = tl.sigmoid(score)
    choice = score
    if BIASED:
        choice += tl.load(bias + expert, mask=there, other=0.0)
    choice = tl.where(there, choice, LOWEST)
    if GROUPS > 1:
        value, left = tl.zeros([G_PAD], tl.float32), choice
        for _ in tl.static_range(BEST):
            top = tl.max(left, 1)
            value += tl.where(g < GROUPS, top, 0.0)
            first = tl.min(tl.where(left == top[:, None], s[None, :], S_PAD), 1)
            left = tl.where(s[None, :] == first[:, None], LOWEST, left)
        value = tl.where(g < GROUPS, value, LOWEST)
        opened = tl.zeros([G_PAD], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            group = tl.min(tl.where(value == tl.max(value, 0), g, G_PAD), 0)
            opened, value = tl.where(g == group, 1, opened), tl.where(g == group, LOWEST, value)
        choice = tl.where((opened > 0)[:, None], choice, LOWEST)
    chosen, weight = tl.zeros([K_PAD], tl.int32), tl.full([K_PAD], LOWEST, tl.float32)
    for i in tl.static_range(K):
        _, best = _best(choice, expert, E)
        own = tl.sum(tl.sum(tl.where(expert == best, tl.where(there, score, 0.0), 0.0), 1), 0)
        chosen, weight = tl.where(k == i, best, chosen), tl.where(k == i, own, weight)
        choice = tl.where(expert == best, LOWEST, choice)
    if SCORES == 2:
        weight = tl.exp(weight - tl.max(weight, 0))
        weight /= tl.sum(weight, 0)
    weight = tl.where(k < K, weight, 0.0)
    if NORMALISES:
        weight /= tl.sum(weight, 0) + epsilon
    weight = tl.where(finite, weight * factor, float("nan"))
    tl.store(ids + token * K + k, tl.where(finite, chosen, k), mask=k < K)
    tl.store(weights + token * K + k, weight, mask=k < K)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids, counts, ranks, num_pairs, E: tl.constexpr, WIDTH: tl.constexpr):
    """Give each pair of token and expert a place among those of its expert."""
    pair = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
    inside = (expert >= 0) & (expert < E)
    tl.store(ranks + pair, tl.atomic_add(counts + expert, 1, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort_kernel(
    ids, counts, ranks, pairs, experts, num_pairs, num_tiles,
    E: tl.constexpr, E_PAD: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):
    """Put pairs into the tiles of their experts; say which expert a tile is of, E for none.

    Ranks become places: of each pair that in `pairs`, -1 for none.
    """
    e = tl.arange(0, E_PAD)
    tiles = (tl.load(counts + e, mask=e < E, other=0) + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    lane = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    owner = tl.sum(tl.where((ends[None, :] <= lane[:, None]) & (e < E)[None, :], 1, 0), 1)
    tl.store(experts + lane, owner, mask=lane < num_tiles)
    expert = tl.load(ids + lane, mask=lane < num_pairs, other=-1)
    inside = (expert >= 0) & (expert < E)
    begin = tl.sum(tl.where(e[None, :] == expert[:, None], (ends - tiles)[None, :], 0), 1)
    rank = tl.load(ranks + lane, mask=inside, other=0)
    place = begin * TILE + rank
    inside = inside & (place >= 0) & (place < num_tiles * TILE)
    tl.store(pairs + place, lane, mask=inside)
    tl.store(ranks + lane, tl.where(inside, place, -1), mask=lane < num_pairs)
# fmt: on


def route(logits: Tensor, bias: Tensor | None, router: Router, ids: Tensor | None = None) -> Routing:
    """See experts.Route."""
    tokens, count = logits.shape
    if ids is None:
        ids = torch.empty((tokens, router.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, router.top_k), dtype=torch.float32, device=logits.device)
    if tokens:
        tensors = logits, logits if bias is None else bias, ids, weights
        numbers = logits.stride(0), router.epsilon, router.factor
        groups = {"GROUPS": router.num_groups, "TOP_GROUPS": router.top_groups, "BEST": router.best_of_group}
        padded = {
            "K_PAD": power_of_2(router.top_k),
            "G_PAD": power_of_2(router.num_groups),
            "S_PAD": power_of_2(count // router.num_groups),
        }
        kind = {"SCORES": _SCORES[router.scores], "BIASED": bias is not None, "NORMALISES": router.normalises}
        sizes = {"E": count, "K": router.top_k, "num_warps": 1 if count <= 256 else 4}
        _route_kernel[(tokens,)](*tensors, *numbers, **sizes, **padded, **groups, **kind, **overlapped())
    return Routing(ids, weights)


class Tiles(NamedTuple):
    """Pairs of tokens and experts, sorted: `pairs` of each tile, -1 where there is none, and its expert.

    places: of each pair, where it is among `pairs`; -1 = nowhere
    """

    pairs: Tensor
    experts: Tensor
    places: Tensor
    number: int
    sizes: dict[str, Any]


def tile_sizes(
    num_pairs: int, count: int, *, dtype: torch.dtype, is_packed: bool, has_bytes: bool = False,
    rounds: bool = False, many: int = _MANY_ROUNDED,
) -> dict[str, Any]:  # fmt: skip
    """Return tiles of the products, and how they are compiled. Few pairs are a tile each, without a dot.

    is_packed: weights are unpacked in registers, which are too few beside large tiles but on Hopper
    has_bytes: weights are bytes that become operands in registers
    rounds: inputs become bytes, too, of few pairs as of many: a token's numbers are the same in any step;
        see `rounded_experts`, which says all but the rows
    many: pairs of an expert, from which on `rounds` has the largest tiles
    dtype: of the tokens; no tensor core multiplies float32: all that is multiplied is in registers, too
    """
    if num_pairs <= _FEW_PAIRS and not rounds:
        tile_n = 8 if has_bytes else 16
        return {"TILE_M": 1, "TILE_N": tile_n, "TILE_K": 256, "num_warps": 4, "num_stages": 3}
    average = num_pairs // count
    if rounds:
        return {"TILE_M": 128 if average >= many else max(16, min(64, 2 * power_of_2(average)))}
    is_tight = dtype == torch.float32 or not has_matrix_units() or (is_packed and not has_warp_groups())
    tile = max(16, min(64 if is_tight else 128, power_of_2(average)))
    is_small = tile < 64
    tile_n, tile_k = 64 if is_small or is_tight else 128, 32 if is_tight else 64
    if has_bytes and not is_tight:
        tile, tile_n, tile_k = min(tile, 64), 64, 128 if is_small else 64
    size = tile_k * 2 * (tile + tile_n) if has_bytes else 2 * 64 * (tile + 2 * tile_n)
    num_stages, warps = stages(3, size), 4 if is_small or has_bytes else 8
    return {"TILE_M": tile, "TILE_N": tile_n, "TILE_K": tile_k, "num_warps": warps, "num_stages": num_stages}


def sort_pairs(ids: Tensor, count: int, *, dtype: torch.dtype, **weights: Any) -> Tiles:
    """Sort pairs into tiles; few of them are a tile each. See `tile_sizes`, also for what weights are."""
    num_pairs = ids.numel()
    sizes = tile_sizes(num_pairs, count, dtype=dtype, **weights)
    tile = sizes["TILE_M"]
    if tile == 1:
        return Tiles(ids, ids, ids, num_pairs, sizes)
    number = min(num_pairs, cdiv(num_pairs, tile) + count)
    counts = torch.zeros(count, dtype=torch.int32, device=ids.device)
    pairs = torch.full((number * tile,), -1, dtype=torch.int32, device=ids.device)
    ranks, experts = torch.empty_like(ids), pairs.new_empty(number)
    width = min(_SORTED_AT_ONCE, max(16, 1 << 14 >> power_of_2(count).bit_length()))
    _count_kernel[(cdiv(num_pairs, width),)](ids, counts, ranks, num_pairs, E=count, WIDTH=width)
    given = ids, counts, ranks, pairs, experts, num_pairs, number
    _sort_kernel[(cdiv(max(num_pairs, number), width),)](
        *given, E=count, E_PAD=power_of_2(count), TILE=tile, WIDTH=width
    )
    return Tiles(pairs, experts, ranks, number, sizes)
