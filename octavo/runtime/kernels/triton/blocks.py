"""Kernels over packed blocks as they are in files: unpack; torch multiplies what was unpacked.

A value's place in its block is arithmetic on its column; the loads that this repeats hit the first-level
cache, so unpacking goes at the speed of memory. Inside a product of tensor cores the same, a byte per value,
was five times slower at any number of rows: for that, see `arranged`.
Formats: block_types.py, and ggml-quants.h of https://github.com/ggml-org/ggml.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from octavo.base.log import get_logger
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.blocks import dequantize_bytes
from octavo.runtime.kernels.ref.group_blocks import FP4, NF4
from octavo.runtime.kernels.triton import eight_bits
from octavo.runtime.kernels.triton.arranged import e2m1, is_arranged, multiply
from octavo.runtime.kernels.triton.arranged import explain as explain_arranged
from octavo.runtime.kernels.triton.arranged import unpack as unpack_arranged
from octavo.runtime.kernels.triton.launch import Counters, cdiv

logger = get_logger(__name__)

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WIDTH = 1024  # values that one unpacking program makes


@triton.jit
def _half(address, mask):
    """Return the float16 at an even address, as float32."""
    return tl.load(address.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _byte(address, mask):
    return tl.load(address, mask=mask, other=0).to(tl.int32)


@triton.jit
def _signed(address, mask):
    return tl.load(address.to(tl.pointer_type(tl.int8)), mask=mask, other=0).to(tl.float32)


@triton.jit
def _float(address, mask):
    return tl.load(address.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)


@triton.jit
def _e4m3(bits):
    """Return what 8 bits stand for: those of a float16 of 2^8 times less."""
    half = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def _scale_and_min(block, group, mask):
    """Unpack those of group 0 … 7 of a Q4_K or Q5_K block: 6 bits each, 2 elsewhere for later groups."""
    upper = group >= 4
    low = _byte(block + 4 + group % 4, mask)
    middle = _byte(block + 8 + group % 4, mask)
    high = _byte(block + 12 + group % 4, mask)
    scale = tl.where(upper, (high & 15) | ((low >> 6) << 4), low & 63)
    minimum = tl.where(upper, (high >> 4) | ((middle >> 6) << 4), middle & 63)
    return scale.to(tl.float32) * _half(block, mask), minimum.to(tl.float32) * _half(block + 2, mask)


@triton.jit
def _unpack_32(block, i, mask, TYPE: tl.constexpr):
    scale = _half(block, mask)
    if TYPE == "Q8_0":
        return scale * _signed(block + 2 + i, mask)
    with_min: tl.constexpr = TYPE == "Q4_1" or TYPE == "Q5_1"
    five: tl.constexpr = TYPE == "Q5_0" or TYPE == "Q5_1"
    start: tl.constexpr = 4 if with_min else 2
    nibbles: tl.constexpr = start + 4 if five else start
    q = (_byte(block + nibbles + i % 16, mask) >> (i // 16 * 4)) & 15
    if five:
        q = q | (((_byte(block + start + i // 8, mask) >> (i % 8)) & 1) << 4)
    if with_min:
        return scale * q.to(tl.float32) + _half(block + 2, mask)
    return scale * (q - (16 if five else 8)).to(tl.float32)


@triton.jit
def _unpack_256(block, i, mask, TYPE: tl.constexpr):
    if TYPE == "Q6_K":
        j = i % 128
        low = (_byte(block + i // 128 * 64 + j % 64, mask) >> (j // 64 * 4)) & 15
        high = (_byte(block + 128 + i // 128 * 32 + j % 32, mask) >> (j // 32 * 2)) & 3
        q = (low | (high << 4)) - 32
        return _half(block + 208, mask) * _signed(block + 192 + i // 16, mask) * q.to(tl.float32)
    scale, minimum = _scale_and_min(block, i // 32, mask)
    nibbles: tl.constexpr = 16 if TYPE == "Q4_K" else 48
    q = (_byte(block + nibbles + i // 64 * 32 + i % 32, mask) >> (i // 32 % 2 * 4)) & 15
    if TYPE == "Q5_K":
        q = q | (((_byte(block + 16 + i % 32, mask) >> (i // 32)) & 1) << 4)
    return scale * q.to(tl.float32) - minimum


@triton.jit
def _unpack_group(block, i, mask, KIND: tl.constexpr, BLOCK: tl.constexpr, levels):
    """Return value i of a block of one of octavo's own types, or of MXFP4.

    KIND: its name without the number of values; levels: of types of few, [16].
    """
    if KIND == "NV4":
        q = (_byte(block + 8 + i % 32, mask) >> (i // 32 * 4)) & 15
        return e2m1(q) * (_e4m3(_byte(block + 4 + i // 16, mask)) * _float(block, mask))
    if KIND == "MXFP4" or KIND == "NF4" or KIND == "FP4":
        start: tl.constexpr = 1 if KIND == "MXFP4" else 4
        q = (_byte(block + start + i % (BLOCK // 2), mask) >> (i // (BLOCK // 2) * 4)) & 15
        if KIND == "MXFP4":
            value = e2m1(q) * (_byte(block, mask) << 23).to(tl.float32, bitcast=True)
        else:
            value = tl.load(levels + q) * _float(block, mask)
        return value
    if KIND == "F8":
        return _e4m3(_byte(block + 4 + i, mask)) * _float(block, mask)
    if KIND == "S8":
        return _signed(block + 4 + i, mask) * _float(block, mask)
    if KIND == "U8":
        q = _signed(block + 4 + i, mask)
    elif KIND == "U4":
        q = ((_byte(block + 4 + i % (BLOCK // 2), mask) >> (i // (BLOCK // 2) * 4)) & 15).to(tl.float32)
    else:
        q = (_byte(block + 4 + i % 16, mask) >> (i // 16 * 2)) & 3
        if KIND == "U3":
            q = q | (((_byte(block + 20 + i // 8, mask) >> (i % 8)) & 1) << 2)
        q = q.to(tl.float32)
    return _half(block, mask) * (q - _half(block + 2, mask))


@triton.jit
def unpack(
    rows, column, mask,
    TYPE: tl.constexpr, IS_GROUP: tl.constexpr, BLOCK: tl.constexpr, NUM_BYTES: tl.constexpr, levels,
):  # fmt: skip
    """Return values at `column` of packed rows that begin at the addresses `rows`; the two are broadcast."""
    block = rows + column // BLOCK * NUM_BYTES
    if IS_GROUP:
        return _unpack_group(block, column % BLOCK, mask, TYPE, BLOCK, levels)
    if BLOCK == 32:
        return _unpack_32(block, column % BLOCK, mask, TYPE)
    # both branches of a constant are compiled after a return
    return _unpack_256(block, column % BLOCK, mask, TYPE)


@triton.jit
def _dequantize_kernel(
    blocks, out, stride, K, levels,
    TYPE: tl.constexpr, IS_GROUP: tl.constexpr, BLOCK: tl.constexpr, NUM_BYTES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < K
    values = unpack(blocks + row * stride, column, inside, TYPE, IS_GROUP, BLOCK, NUM_BYTES, levels)
    tl.store(out + row * K + column, values.to(out.dtype.element_ty), mask=inside)


def block_dequantize(matrix: Packed, places: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """See linear.BlockDequantize."""
    if matrix.scales is not None:
        return dequantize_bytes(matrix, places) * scale
    rows = _dequantize(
        matrix if places is None else matrix._replace(blocks=matrix.blocks[places]), torch.float32
    )
    return rows if scale == 1.0 else rows * scale


def _dequantize(matrix: Packed, dtype: torch.dtype) -> Tensor:
    blocks, type_name = matrix.blocks, matrix.type_name
    if is_arranged(matrix):
        return unpack_arranged(matrix, dtype)
    if type_name in PLAIN:
        return blocks.contiguous().view(PLAIN[type_name]).to(dtype)
    rows, columns = len(blocks), matrix.num_inputs
    out = torch.empty((rows, columns), dtype=dtype, device=blocks.device)
    if rows:
        given = blocks, out, blocks.stride(0), columns, levels_of(type_name, blocks.device)
        _dequantize_kernel[(rows, cdiv(columns, _WIDTH))](*given, **constants_of(matrix), WIDTH=_WIDTH)
    return out


def constants_of(matrix: Packed) -> dict[str, Any]:
    """Return what `unpack` is compiled for."""
    is_group = not matrix.type_name.startswith("Q")
    return {
        "TYPE": matrix.type_name.partition("_")[0] if is_group else matrix.type_name,
        "IS_GROUP": is_group,
        "BLOCK": matrix.kind.block,
        "NUM_BYTES": matrix.kind.num_bytes,
    }


@functools.cache
def levels_of(type_name: str, device: torch.device) -> Tensor | None:
    """Return what the 16 codes of a type stand for; None for types that count."""
    levels = {"NF4": NF4, "FP4": FP4}.get(type_name.partition("_")[0])
    return None if levels is None else torch.tensor(levels, device=device)


def block_matmul(
    counters: Counters, x: Tensor, matrix: Packed, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """See linear.BlockMatmul; inputs are rounded only as the recipe of an 8-bit checkpoint asks."""
    if matrix.scales is not None:
        return eight_bits.multiply(counters, x, matrix, bias, out)
    if is_arranged(matrix):
        return multiply(counters, x, matrix, bias, out)
    _tell_once(matrix.type_name)
    made = functional.linear(x, _dequantize(matrix, x.dtype), bias)
    return made if out is None else out.copy_(made)


def explain(matrix: Packed) -> str:
    """See LinearKernels.explain."""
    if matrix.scales is not None:
        return eight_bits.explain(matrix)
    if is_arranged(matrix):
        return explain_arranged(matrix)
    if matrix.type_name in PLAIN:
        return "torch"
    return "unpacked for every product, which torch computes: tensor cores take no such blocks"


@functools.cache
def _tell_once(type_name: str) -> None:
    if type_name not in PLAIN:
        logger.info("Matrices of %s are unpacked in every step, then multiplied by torch.", type_name)
