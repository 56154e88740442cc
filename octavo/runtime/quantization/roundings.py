"""`PACKERS` makes blocks of plain weights: of each name that the option `quantization` may have."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.block_types import TYPES_BY_NAME
from octavo.runtime.quantization import k_quants
from octavo.runtime.quantization.blocks import Blocks, blocks_of_one
from octavo.runtime.quantization.grouped import Grouped, pack
from octavo.runtime.quantization.q8_0 import pack as pack_q8_0

Round = Callable[[Tensor], Grouped]


def _to_fp8(rows: int, columns: int, matrix: Tensor) -> Grouped:
    """Round to E4M3 under one scale per so many rows and columns, 0 = all."""
    n, k = matrix.shape
    groups = torch.arange(k) // (columns or k)
    largest = _cut(_cut(matrix.abs(), columns or k).amax(-1).t(), rows or n).amax(-1).t()
    scales = (largest / 448).clamp(min=1e-30)[torch.arange(n) // (rows or n)]
    codes = (matrix / scales[:, groups]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Grouped("F8", codes.view(torch.uint8), scales, None, groups)


def _cut(matrix: Tensor, size: int) -> Tensor:
    """Return each row in parts of `size` numbers, the last one filled up with 0: [rows, parts, size]."""
    return functional.pad(matrix, (0, -matrix.shape[1] % size)).reshape(len(matrix), -1, size)


def _to_mxfp8(matrix: Tensor) -> Grouped:
    """Round to E4M3 under a power of two per 32."""
    largest = matrix.view(len(matrix), -1, 32).abs().amax(-1)
    scales = torch.exp2((largest.clamp(min=1e-30).log2().floor() - 8).clamp(-126, 127))
    groups = torch.arange(matrix.shape[1]) // 32
    codes = (matrix / scales[:, groups]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Grouped("F8", codes.view(torch.uint8), scales, None, groups)


def _to_int4(group: int, matrix: Tensor) -> Grouped:
    """Round to 16 levels between the least and the largest of a group; 0 is one of them."""
    groups = torch.arange(matrix.shape[1]) // group
    parts = _cut(matrix, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=2**-14).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    codes = (matrix / scales[:, groups] + zeros[:, groups]).round().clamp(0, 15)
    return Grouped("U4", codes.to(torch.uint8), scales, zeros, groups)


_ROUNDINGS: dict[str, Round] = {
    "fp8_per_tensor": partial(_to_fp8, 0, 0),
    "fp8_per_channel": partial(_to_fp8, 1, 0),
    "fp8_per_block": partial(_to_fp8, 128, 128),
    "mxfp8": _to_mxfp8,
    "int4": partial(_to_int4, 128),
    "int4_32": partial(_to_int4, 32),
    "int4_64": partial(_to_int4, 64),
}
"""int4_N: groups of N weights."""


def _rounded(rounding: Round, matrix: Tensor) -> Blocks:
    *rows, columns = matrix.shape
    if columns % 64:
        return blocks_of_one(matrix.contiguous())
    blocks, places = pack(rounding(matrix.reshape(-1, columns).float()))
    assert places is None, "whole blocks need no other order"
    return Blocks(blocks.data.view(*rows, -1), blocks.type)


def _of_gguf(type_name: str, matrix: Tensor) -> Blocks:
    """Round to a type of GGUF's; where columns do not fill its blocks, to 8 bits under a scale per 32."""
    fits = matrix.shape[-1] % TYPES_BY_NAME[type_name].block == 0
    return k_quants.quantize(matrix, type_name) if fits else pack_q8_0(matrix)


PACKERS: dict[str, Callable[[Tensor], Blocks]] = {
    **{name: partial(_rounded, rounding) for name, rounding in _ROUNDINGS.items()},
    **{name.lower(): partial(_of_gguf, name) for name in k_quants.ROUND},
    **dict.fromkeys(("int8", "int8_per_channel_weight_only"), pack_q8_0),
}
"""Take a matrix, or a stack of some."""
