"""What the attention kernels are compiled for, by the shapes of a call: tiles, warps, stages, splits.

The numbers were measured on one H200, with 8 key heads of 128.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.triton.launch import (
    NUM_PROGRAMS,
    card,
    cdiv,
    fits,
    has_copy_engine,
    has_matrix_units,
    has_warp_groups,
    power_of_2,
)

_LEAST, _SMALL, _MIDDLE, _LARGE = 16, 32, 64, 128  # keys of a tile in decoding
_MIN_KEYS = {_LEAST: 32, _SMALL: 32, _MIDDLE: 64, _LARGE: 512}  # fewest keys of a part
_MAX_SPLITS = 32
_FEW_PAIRS = 64  # of requests and key heads
_ONE_WAVE = 128  # the most pairs of which each gets its share of one wave of programs
_BY_PAIRS = (
    (_FEW_PAIRS, (_SMALL, 2, 3)),
    (_ONE_WAVE, (_SMALL, 2, 4)),
    (NUM_PROGRAMS, (_SMALL, 2, 3)),
    (NUM_PROGRAMS * 2, (_SMALL, 2, 2)),
)
_MANY_PAIRS = _SMALL, 1, 3
"""Keys of a tile, warps and stages for up to so many pairs, keys being of 16 bits.

The time follows the tiles more than the bytes: 193 keys in tiles of 128 took as long as 256. So tiles are
small, with as many stages as let all programs be there at once (4, 5 or 8 on a multiprocessor).
"""
_SWAPPED = _SMALL, 1, 3
"""The same of `swap_ab`, which decodes from _FEW_PAIRS on where it can."""
_LONG, _SPLITS_OF_LONG = 512, 4
"""Fewest keys of a part, and the most parts, where only what is longer than others is cut."""


class Shapes(NamedTuple):
    """What decides how attention is compiled."""

    num_heads: int
    cache: torch.Size
    q_type: torch.dtype
    cache_type: torch.dtype

    def constants(self) -> dict[str, Any]:
        """Return what all kernels of attention are compiled for."""
        _, _, block_size, num_kv_heads, head_dim = self.cache
        dot = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(self.q_type, tl.float32)
        if self.cache_type == torch.float8_e4m3fn and self.q_type == torch.bfloat16:
            dot = tl.float16  # which 8-bit floats become in one instruction
        narrow = self.cache_type != torch.float32 and not triton.knobs.runtime.interpret
        return {
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": self.num_heads // num_kv_heads,
            "D": head_dim,
            "D_PAD": max(16, power_of_2(head_dim)),
            "BLOCK_SIZE": block_size,
            "DOT": dot if narrow else tl.float32,
        }


def is_slow(constants: dict[str, Any]) -> bool:
    """Return True if no tensor core makes the products: large tiles would leave the registers."""
    return constants["DOT"] == tl.float32 or not has_matrix_units()


class Call(NamedTuple):
    """What a kernel of attention is launched with, for some requests of a batch.

    factors: scale and soft cap, for base 2, sinks, as they are, and the tensors of a Share
    kind:    further constants: WINDOW, CAPPED, SINKS, SHARED, PDL
    """

    q: Tensor
    cache: Tensor
    block_tables: Tensor
    kv_lens: Tensor
    out: Tensor
    factors: tuple[float, float, Tensor, Tensor, Tensor]
    shapes: Shapes
    kind: dict[str, Any]


def split(num_pairs: int, longest: int, tile: int) -> tuple[int, int]:
    """Return (fewest keys of a part, into how many parts those of each request and key head are cut at most).

    One wave of programs, where few requests run: a second one, not full, would cost more than it brings.
    Where more run, only what is longer than others is cut, which would be read alone at the end: in long
    parts, and the last programs have nothing to do. Of many the longest begin first, and that is enough.
    """
    if num_pairs <= _ONE_WAVE:
        min_keys, most = _MIN_KEYS[tile], min(NUM_PROGRAMS // num_pairs, _MAX_SPLITS)
    else:
        min_keys, most = _LONG, _SPLITS_OF_LONG if num_pairs <= NUM_PROGRAMS * 2 else 1
    return min_keys, max(1, min(most, cdiv(longest, min_keys)))


@functools.cache
def decode_tiles(shapes: Shapes, num_pairs: int, has_window: bool) -> tuple[bool, dict[str, Any]]:
    """Return whether `swap_ab` decodes, and what the one that does is compiled for, as on an H200."""
    constants, cache_type = shapes.constants(), shapes.cache_type
    is_swapped = num_pairs >= _FEW_PAIRS and not has_window and _can_be_copied(constants, cache_type)
    if is_swapped:
        tile = _SWAPPED
    elif is_slow(constants):
        tile = _few_keys(constants), 8 if constants["D"] > 128 else 4, 2
    elif constants["D"] > 128 and num_pairs > _FEW_PAIRS:
        tile = _MIDDLE, 4, 2
    elif cache_type.itemsize == 1 and num_pairs > _FEW_PAIRS:
        tile = _LARGE, 4, 2
    else:
        tile = next((tile for most, tile in _BY_PAIRS if num_pairs <= most), _MANY_PAIRS)
    tile_k, warps, stages = tile
    known = card()
    tile_m = max(8 if is_swapped else 16, power_of_2(constants["GROUP"]))
    return is_swapped, constants | {
        "TILE_M": tile_m,
        "TILE_K": tile_k,
        "num_warps": max(warps, min(8, tile_m * constants["D_PAD"] // 2048)),  # 64 sums of a thread at most
        "num_stages": min(stages, known.most_stages) if known else stages,
    }


def _few_keys(constants: dict[str, Any]) -> int:
    size = 4 * constants["D_PAD"]
    return _SMALL if fits(2, 2 * _SMALL * size, 16 * size) else _LEAST


def _can_be_copied(constants: dict[str, Any], cache_type: torch.dtype) -> bool:
    """Return True if tiles of the size for that lie in the cache as they are multiplied."""
    is_whole = constants["D"] == constants["D_PAD"] <= 128 and constants["BLOCK_SIZE"] % _SMALL == 0
    is_narrow = cache_type.itemsize == 2 and constants["DOT"] != tl.float32
    return is_whole and has_copy_engine() and (is_narrow or triton.knobs.runtime.interpret)


@functools.cache
def shared_prefix_tiles(shapes: Shapes, num_requests: int) -> dict[str, Any]:
    """Return what the kernel for common beginnings is compiled for. Tiles of keys do not cross blocks."""
    constants, block_size = shapes.constants(), shapes.cache[2]
    tile_m = max(16, power_of_2(constants["GROUP"]))
    pack, largest = tile_m // constants["GROUP"], block_size & -block_size
    is_alone = cdiv(num_requests, pack) * constants["NUM_KV_HEADS"] <= NUM_PROGRAMS // 4
    is_tight = is_slow(constants) and (constants["D_PAD"] == 128 or not has_warp_groups())
    keys = _few_keys(constants) if is_tight else _SMALL if constants["D"] > 128 else _MIDDLE
    return constants | {
        "TILE_M": tile_m,
        "TILE_K": min(keys, largest),
        "PACK": pack,
        "num_warps": (8 if constants["D"] > 128 else 4) if is_tight else 2,
        "num_stages": 3 if is_alone and not is_slow(constants) else 2,
    }


@functools.cache
def prefill_tiles(shapes: Shapes) -> dict[str, Any]:
    """Return what the prefill kernel is compiled for, as measured on an H200; less where memory is short."""
    constants = shapes.constants()
    heads, size = max(16, power_of_2(constants["GROUP"])), 2 * constants["D_PAD"]
    if is_slow(constants):
        tiles = (16, 16, 4, 2) if constants["D"] > 128 else (32, 32, 4, 2)
    else:
        wanted = (
            ((128, 64, 8, 2), (64, 32, 4, 2)) if constants["D"] > 128 else ((64, 64, 4, 3), (64, 64, 4, 2))
        )
        able = (tile for tile in wanted if fits(tile[3], 2 * tile[1] * size, tile[0] * size))
        tiles = next(able, (32, 32, 4, 2))
    tiles = (max(tiles[0], heads), *tiles[1:])
    return constants | dict(zip(("TILE_M", "TILE_K", "num_warps", "num_stages"), tiles, strict=True))
