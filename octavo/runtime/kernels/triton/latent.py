"""Attention over a latent cache (MLA): one vector per token is the key of all heads, and its end their value.

A tile of keys is loaded once for both products. Rows of the tile of queries are heads in decoding, tokens
and heads in prompts, so few heads fill a tensor core, too. What of a key is no value, `ROPE` components, is
multiplied apart: the sizes of both parts are powers of two in practice, that of the whole is none.

Decoding is cut over the keys, as in `split_keys`; joining is a kernel of its own here, because a part of a
head has 512 sums, too many for one program to join those of all parts and heads.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.triton.launch import cdiv, fits, overlapped, power_of_2, release, wait
from octavo.runtime.kernels.triton.online_softmax import locate, log_of_sum, look_up, own_bounds
from octavo.runtime.kernels.triton.split_keys import own_split, part_size
from octavo.runtime.kernels.triton.tiles import Call, Shapes, is_slow

_PROGRAMS = 2 * 132
"""Of decoding, which occupy the device: two on a multiprocessor."""
_MAX_SPLITS = 128
_MIN_KEYS = 128
"""Of a part: fewer cost more to join than they bring."""
_KEYS = 32
"""Of a tile."""
_JOINED_AT_ONCE, _JOINED_WIDTH = 64, 128
"""Parts and components, of which a joining program loads so many together: it waits for memory seldom."""


# fmt: off
@triton.jit
def _attend(
    q_rope, q_latent, position, first_key, whole_end, end_key, cache, table, scale,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, DOT: tl.constexpr,
):
    """Attend to keys first_key … end_key - 1: (maxima, sums, weighted values).

    Every row sees all before whole_end, and of the others those up to its position, if it has one.
    """
    SIZE: tl.constexpr = ROPE + LATENT
    maxima, sums = tl.full([TILE_M], float("-inf"), tl.float32), tl.zeros([TILE_M], tl.float32)
    total = tl.zeros([TILE_M, LATENT_PAD], tl.float32)
    r, d, place = tl.arange(0, ROPE_PAD), tl.arange(0, LATENT_PAD), tl.arange(0, TILE_K)
    blocks = look_up(table, first_key, end_key, BLOCK_SIZE, TILE_K)
    for masked in tl.static_range(2):
        for start in range(whole_end if masked else first_key, end_key if masked else whole_end, TILE_K):
            key = start + place
            stored = key < end_key if masked else key >= 0
            source = (blocks.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * SIZE
            blocks = look_up(table, start + TILE_K, end_key, BLOCK_SIZE, TILE_K)
            inside = stored[:, None] & (d < LATENT)[None, :]
            latent = tl.load(cache + (source + ROPE)[:, None] + d[None, :], mask=inside, other=0.0).to(DOT)
            scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
            if ROPE > 0:
                inside = stored[:, None] & (r < ROPE)[None, :]
                rope = tl.load(cache + source[:, None] + r[None, :], mask=inside, other=0.0).to(DOT)
                scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
            scores *= scale
            if masked:
                visible = stored[None, :]
                if position is not None:
                    visible = visible & (key[None, :] <= position[:, None])
                scores = tl.where(visible, scores, float("-inf"))
            higher = tl.maximum(maxima, tl.max(scores, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen no key yet
            weights = tl.exp2(scores - shift[:, None])
            fade = tl.exp2(maxima - shift)
            total = tl.dot(weights.to(DOT), latent, total * fade[:, None], input_precision="ieee")
            sums = sums * fade + tl.sum(weights, 1)
            maxima = higher
    return maxima, sums, total


@triton.jit
def _load_queries(source, real, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, LATENT: tl.constexpr,
                  LATENT_PAD: tl.constexpr, DOT: tl.constexpr):
    """Return both parts of the queries at `source` [rows]; zeros where a row is not real."""
    r, d = tl.arange(0, ROPE_PAD), tl.arange(0, LATENT_PAD)
    rope = tl.load(source[:, None] + r[None, :], mask=real[:, None] & (r < ROPE)[None, :], other=0.0)
    inside = real[:, None] & (d < LATENT)[None, :]
    return rope.to(DOT), tl.load(source[:, None] + ROPE + d[None, :], mask=inside, other=0.0).to(DOT)


@triton.jit(
    do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["block_tables", "kv_lens"]
)
def _latent_decode_kernel(
    q, cache, block_tables, kv_lens, out, log_sums, told, stride_q, stride_table, scale,
    NUM_HEADS: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
    SHARED: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr, SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr,
):
    """Attend to one of SPLITS parts of a request's keys for TILE_M heads; a single one is the result."""
    request, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    kv_len = tl.load(kv_lens + request)
    first_key, end_key, num_splits = own_split(0, kv_len, TILE_K, MIN_KEYS)
    wait(PDL)
    if part >= tl.maximum(num_splits, 1):
        return
    head = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    real = head < NUM_HEADS
    source = q + request * stride_q + head * (ROPE + LATENT)
    q_rope, q_latent = _load_queries(source, real, ROPE, ROPE_PAD, LATENT, LATENT_PAD, DOT)
    maxima, sums, total = _attend(
        q_rope, q_latent, None, first_key, first_key, end_key, cache, block_tables + request * stride_table,
        scale, ROPE, ROPE_PAD, LATENT, LATENT_PAD, BLOCK_SIZE, TILE_M, TILE_K, DOT,
    )
    release(PDL)
    total *= (1.0 / tl.where(sums == 0.0, 1.0, sums))[:, None]
    d, place = tl.arange(0, LATENT_PAD), request * NUM_HEADS + head
    inside = real[:, None] & (d < LATENT)[None, :]
    if SPLITS == 1:
        target = out + (place * (ROPE + LATENT) + ROPE)[:, None] + d[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=inside)
        if SHARED:
            tl.store(told + place, log_of_sum(maxima, sums), mask=real)
    else:
        place = place * SPLITS + part
        tl.store(out + (place * LATENT)[:, None] + d[None, :], total, mask=inside)
        tl.store(log_sums + place, maxima + tl.log2(sums), mask=real)


@triton.jit(do_not_specialize_on_alignment=["kv_lens"])
def _join_kernel(
    partial, log_sums, kv_lens, out, told,
    NUM_HEADS: tl.constexpr, ROPE: tl.constexpr, LATENT: tl.constexpr, TILE_K: tl.constexpr,
    SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, MIN_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):
    """Join the parts of some of a head's components, weighted by what each saw; zeros where none has keys."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_len = tl.load(kv_lens + request)
    num_splits = tl.cdiv(kv_len, part_size(kv_len, SPLITS, TILE_K, MIN_KEYS))
    place = (request * NUM_HEADS + head) * SPLITS
    every, few = tl.arange(0, SPLITS_PAD), tl.arange(0, AT_ONCE)
    d = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    wait(PDL)
    seen = tl.load(log_sums + place + every, mask=every < num_splits, other=float("-inf"))
    highest = tl.max(seen, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weight_of_all = tl.sum(tl.exp2(seen - highest), 0)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(0, num_splits, AT_ONCE):
        part = first + few
        there = part < num_splits
        weight = tl.exp2(tl.load(log_sums + place + part, mask=there, other=float("-inf")) - highest)
        source = partial + ((place + part) * LATENT)[:, None] + d[None, :]
        values = tl.load(source, mask=there[:, None] & (d < LATENT)[None, :], other=0.0)
        total += tl.sum(values * weight[:, None], 0)
    release(PDL)
    total /= tl.where(weight_of_all == 0.0, 1.0, weight_of_all)
    target = out + (request * NUM_HEADS + head) * (ROPE + LATENT) + ROPE + d
    tl.store(target, total.to(out.dtype.element_ty), mask=d < LATENT)
    if SHARED:
        tl.store(told + request * NUM_HEADS + head, log_of_sum(tl.max(seen, 0), weight_of_all))


@triton.jit(
    do_not_specialize=["num_requests", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "cu_q_lens", "kv_lens", "num_seen", "told"],
)
def _latent_prefill_kernel(
    q, cache, block_tables, cu_q_lens, kv_lens, out, num_seen, told,
    stride_q, stride_table, num_requests, scale,
    NUM_HEADS: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
    HEADS: tl.constexpr, SHARED: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):
    """Attend for a tile of queries and HEADS heads: row m is query m // HEADS and head m % HEADS of them.

    The last tiles, which see the most keys, begin first.
    """
    TILE_Q: tl.constexpr = TILE_M // HEADS
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    request, begin, q_len, first_q = locate(cu_q_lens, tile, num_requests, TILE_Q)
    kv_len = tl.load(kv_lens + request)
    wait(PDL)
    if first_q >= q_len:
        return
    first_position = kv_len - q_len + first_q
    end_key = tl.minimum(first_position + TILE_Q, kv_len)
    if SHARED:
        first_position, end_key = own_bounds(num_seen + begin, first_q, q_len, TILE_Q)
    row, d = tl.arange(0, TILE_M), tl.arange(0, LATENT_PAD)
    index, head = first_q + row // HEADS, tl.program_id(0) * HEADS + row % HEADS
    real = (index < q_len) & (head < NUM_HEADS)
    position = kv_len - q_len + index
    if SHARED:
        position = tl.load(num_seen + begin + index, mask=real, other=0) - 1
    token = (begin + index).to(tl.int64)
    source = q + token * stride_q + head * (ROPE + LATENT)
    q_rope, q_latent = _load_queries(source, real, ROPE, ROPE_PAD, LATENT, LATENT_PAD, DOT)
    whole_end = tl.maximum(tl.minimum(first_position + 1, end_key) // TILE_K * TILE_K, 0)
    maxima, sums, total = _attend(
        q_rope, q_latent, position, 0, whole_end, end_key, cache,
        block_tables + request.to(tl.int64) * stride_table,
        scale, ROPE, ROPE_PAD, LATENT, LATENT_PAD, BLOCK_SIZE, TILE_M, TILE_K, DOT,
    )
    release(PDL)
    total = total / tl.where(sums == 0.0, 1.0, sums)[:, None]
    target = out + ((token * NUM_HEADS + head) * (ROPE + LATENT) + ROPE)[:, None] + d[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=real[:, None] & (d < LATENT)[None, :])
    if SHARED:
        tl.store(told + token * NUM_HEADS + head, log_of_sum(maxima, sums), mask=real)
# fmt: on


def attend_to_latents(singles: Call, others: Call, cu_q_lens: Tensor, keys_only: int) -> None:
    """Fill `out` of requests with one new token, and of others: launches follow from the shapes alone."""
    if len(singles.kv_lens):
        _decode(singles, keys_only)
    if len(others.kv_lens):
        _prefill(others, cu_q_lens, keys_only)


def _decode(call: Call, keys_only: int) -> None:
    q, cache, block_tables, kv_lens, out, (scale, *_, told), shapes, kind = call
    shared = {"SHARED": kind["SHARED"]} | overlapped()
    num_requests, num_heads, size = q.shape
    constants = _constants(shapes, keys_only) | decode_tiles(shapes)
    num_tiles = cdiv(num_heads, constants["TILE_M"])
    longest = block_tables.shape[1] * cache.shape[2]
    splits = _num_splits(num_requests * num_tiles, longest)
    target, log_sums = out, out
    if splits > 1:
        target = q.new_empty((num_requests, num_heads, splits, size - keys_only), dtype=torch.float32)
        log_sums = q.new_empty((num_requests, num_heads, splits), dtype=torch.float32)
    tensors = q, cache, block_tables, kv_lens, target, log_sums, told
    numbers = q.stride(0), block_tables.stride(0), scale
    parts = {"SPLITS": splits, "MIN_KEYS": _MIN_KEYS}
    _latent_decode_kernel[(num_tiles, num_requests, splits)](
        *tensors, *numbers, **parts, **constants, **shared
    )
    if splits > 1:
        width = min(_JOINED_WIDTH, constants["LATENT_PAD"])
        sizes = {name: constants[name] for name in ("NUM_HEADS", "ROPE", "LATENT", "TILE_K")}
        padded = power_of_2(splits)
        joined = {"SPLITS_PAD": padded, "AT_ONCE": min(_JOINED_AT_ONCE, padded), "WIDTH": width}
        _join_kernel[(num_requests, num_heads, cdiv(size - keys_only, width))](
            target, log_sums, kv_lens, out, told, num_warps=4, **sizes, **parts, **joined, **shared
        )


def _prefill(call: Call, cu_q_lens: Tensor, keys_only: int) -> None:
    q, cache, block_tables, kv_lens, out, (scale, _, _, *share), shapes, kind = call
    constants = _constants(shapes, keys_only) | prefill_tiles(shapes)
    num_tiles = len(q) // (constants["TILE_M"] // constants["HEADS"]) + len(kv_lens)
    tensors = q, cache, block_tables, cu_q_lens, kv_lens, out, *share
    numbers = q.stride(0), block_tables.stride(0), len(kv_lens), scale
    constants["SHARED"] = kind["SHARED"]
    grid = cdiv(q.shape[1], constants["HEADS"]), num_tiles
    _latent_prefill_kernel[grid](*tensors, *numbers, **constants, **overlapped())


def _constants(shapes: Shapes, keys_only: int) -> dict[str, Any]:
    latent = shapes.cache[4] - keys_only
    return {
        "NUM_HEADS": shapes.num_heads,
        "ROPE": keys_only,
        "ROPE_PAD": max(16, power_of_2(max(keys_only, 1))),
        "LATENT": latent,
        "LATENT_PAD": max(16, power_of_2(latent)),
        "BLOCK_SIZE": shapes.cache[2],
        "DOT": shapes.constants()["DOT"],
    }


def _num_splits(num_pairs: int, longest: int) -> int:
    """Return into how many parts keys are cut: as many as occupy the device, where few requests run."""
    return max(1, min(_PROGRAMS // num_pairs, _MAX_SPLITS, cdiv(longest, _MIN_KEYS)))


@functools.cache
def decode_tiles(shapes: Shapes) -> dict[str, Any]:
    """Return tiles, warps and stages of decoding."""
    most = min(64, max(16, power_of_2(shapes.num_heads)))
    if is_slow(shapes.constants()):
        return _smallest(shapes)
    tile_m, num_stages = _fitting(shapes, most)
    return {
        "TILE_M": tile_m,
        "TILE_K": _KEYS,
        "num_warps": 8 if tile_m == 64 else 4,
        "num_stages": num_stages,
    }


def _smallest(shapes: Shapes) -> dict[str, Any]:
    """Return tiles without tensor cores: in float32, whatever the cache holds."""
    size = 4 * shapes.cache[4]
    tile_m = 16 if fits(2, 16 * size, 16 * size) else 8
    return {"TILE_M": tile_m, "TILE_K": 16, "num_warps": 4, "num_stages": 2}


def _fitting(shapes: Shapes, most: int) -> tuple[int, int]:
    """Return rows, `most` or fewer, and stages that fit the device's shared memory."""
    size = 2 * shapes.cache[4]
    able = ((m, n) for m in (64, 32, 16) for n in (3, 2) if m <= most and fits(n, _KEYS * size, m * size))
    return next(able, (16, 1))


@functools.cache
def prefill_tiles(shapes: Shapes) -> dict[str, Any]:
    """Return the same of prompts: 64 rows, whose sums are half of all registers there are."""
    heads = power_of_2(shapes.num_heads)
    if is_slow(shapes.constants()):
        smallest = _smallest(shapes)
        return smallest | {"HEADS": min(smallest["TILE_M"], heads)}
    tile_m, num_stages = _fitting(shapes, 64)
    how = {"TILE_K": _KEYS, "num_warps": max(4, tile_m // 8), "num_stages": num_stages}
    return how | {"TILE_M": tile_m, "HEADS": min(tile_m, heads)}
