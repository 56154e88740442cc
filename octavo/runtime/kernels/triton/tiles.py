"""What the attention kernels are compiled for, by the shapes of a call: tiles, warps, stages, splits.

The numbers were measured on one H200, with 8 key heads of 128.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.runtime.kernels.triton.launch import NUM_PROGRAMS, parts, power_of_2

_SMALL, _MIDDLE, _LARGE = 32, 64, 128  # keys of a tile in decoding
MIN_KEYS = {_SMALL: 32, _MIDDLE: 64, _LARGE: 512}  # fewest keys of a part
_FEW_PAIRS, _SOME_PAIRS = 64, 192  # of requests and key heads: few wait for latency, many for memory
_MAX_PARTS = 32


def split(num_pairs: int, longest: int, tile: int, itemsize: int) -> int:
    """Into how many parts the keys of each (request, key head) are cut at most.

    One wave of programs: a second one, not full, would cost more than it brings. Of the largest tiles of more
    than 8 bits three programs fit a multiprocessor, of others four.
    """
    num_programs = NUM_PROGRAMS * 3 // 4 if tile == _LARGE and itemsize > 1 else NUM_PROGRAMS
    return max(1, min(num_programs // num_pairs, parts(longest, MIN_KEYS[tile]), _MAX_PARTS))


@functools.cache
def decode_tiles(
    num_heads: int,
    cache_shape: torch.Size,
    q_type: torch.dtype,
    cache_type: torch.dtype,
    num_pairs: int,
) -> dict[str, Any]:
    """What the decode kernel is compiled for; tiles, warps and stages as measured on an H200."""
    constants = _shape(num_heads, cache_shape, q_type, cache_type)
    tile_k, warps, stages = _MIDDLE, 4, 3
    if constants["DOT"] == tl.float32:
        tile_k, stages = _SMALL, 2
    elif num_pairs <= _FEW_PAIRS:
        tile_k, warps, stages = _SMALL, 2, 4
    elif constants["D"] > 128:
        stages = 2
    elif num_pairs > _SOME_PAIRS or cache_type.itemsize == 1:
        tile_k, stages = _LARGE, 2
    return constants | {
        "TILE_M": max(16, power_of_2(constants["GROUP"])),
        "TILE_K": tile_k,
        "num_warps": warps,
        "num_stages": stages,
    }


@functools.cache
def packed_tiles(
    num_heads: int, cache_shape: torch.Size, q_type: torch.dtype, cache_type: torch.dtype
) -> dict[str, Any]:
    """What the kernel for common beginnings is compiled for. Tiles of keys do not cross blocks."""
    constants = _shape(num_heads, cache_shape, q_type, cache_type)
    tile_m = max(16, power_of_2(constants["GROUP"]))
    return constants | {
        "TILE_M": tile_m,
        "TILE_K": min(_MIDDLE if constants["D"] <= 128 else _SMALL, constants["BLOCK_SIZE"]),
        "PACK": tile_m // constants["GROUP"],
        "num_warps": 2,
        "num_stages": 2 if constants["DOT"] == tl.float32 else 3,
    }


@functools.cache
def prefill_tiles(
    num_heads: int, cache_shape: torch.Size, q_type: torch.dtype, cache_type: torch.dtype
) -> dict[str, Any]:
    """What the prefill kernel is compiled for, as measured on an H200."""
    constants = _shape(num_heads, cache_shape, q_type, cache_type)
    heads = max(16, power_of_2(constants["GROUP"]))
    if constants["DOT"] == tl.float32:
        tiles = (max(32, heads), 32, 4, 2)
    elif constants["D"] > 128:
        tiles = (max(128, heads), 64, 8, 2)
    else:
        tiles = (max(64, heads), 64, 4, 3)
    return constants | dict(zip(("TILE_M", "TILE_K", "num_warps", "num_stages"), tiles, strict=True))


def _shape(
    num_heads: int, cache_shape: torch.Size, q_type: torch.dtype, cache_type: torch.dtype
) -> dict[str, Any]:
    _, _, block_size, num_kv_heads, head_dim = cache_shape
    dot = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(q_type, tl.float32)
    if cache_type == torch.float8_e4m3fn and q_type == torch.bfloat16:
        dot = tl.float16  # which 8-bit floats become in one instruction
    narrow = cache_type != torch.float32 and not triton.knobs.runtime.interpret
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "D": head_dim,
        "D_PAD": max(16, power_of_2(head_dim)),
        "BLOCK_SIZE": block_size,
        "DOT": dot if narrow else tl.float32,
    }
