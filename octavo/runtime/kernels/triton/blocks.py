"""Kernels over GGUF's quantized blocks: unpack; torch multiplies what was unpacked.

A value's place in its block is arithmetic on its column; the loads that this repeats hit the first-level
cache, so unpacking goes at the speed of memory. Unpacking inside a product of tensor cores was five times
slower than this at any number of rows.
Formats: ggml-quants.h of https://github.com/ggml-org/ggml.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from octavo.base.log import get_logger
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.triton.launch import cdiv

logger = get_logger(__name__)

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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
    """Return value i of a block of 32."""
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
    """Return value i of a block of 256."""
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
def _unpack(rows, column, mask, TYPE: tl.constexpr, BLOCK: tl.constexpr, NUM_BYTES: tl.constexpr):
    """Return values at `column` of packed rows that begin at the addresses `rows`; the two are broadcast."""
    block = rows + column // BLOCK * NUM_BYTES
    if BLOCK == 32:
        return _unpack_32(block, column % BLOCK, mask, TYPE)
    else:  # noqa: RET505  # both branches of a constant are compiled after a return
        return _unpack_256(block, column % BLOCK, mask, TYPE)


@triton.jit
def _dequantize_kernel(
    blocks,
    out,
    stride,
    K,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Unpack WIDTH values of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < K
    values = _unpack(blocks + row * stride, column, inside, TYPE, BLOCK, NUM_BYTES)
    tl.store(out + row * K + column, values.to(out.dtype.element_ty), mask=inside)


def block_dequantize(matrix: Packed, places: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """See linear.BlockDequantize."""
    rows = _dequantize(
        matrix if places is None else matrix._replace(blocks=matrix.blocks[places]), torch.float32
    )
    return rows if scale == 1.0 else rows * scale


def _dequantize(matrix: Packed, dtype: torch.dtype) -> Tensor:
    blocks, type_name, _ = matrix
    if type_name in _PLAIN:
        return blocks.contiguous().view(_PLAIN[type_name]).to(dtype)
    rows, columns = len(blocks), matrix.num_inputs
    out = torch.empty((rows, columns), dtype=dtype, device=blocks.device)
    if rows:
        _dequantize_kernel[(rows, cdiv(columns, _WIDTH))](
            blocks,
            out,
            blocks.stride(0),
            columns,
            TYPE=type_name,
            BLOCK=matrix.kind.block,
            NUM_BYTES=matrix.kind.num_bytes,
            WIDTH=_WIDTH,
        )
    return out


def block_matmul(x: Tensor, matrix: Packed, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """See linear.BlockMatmul; inputs are never rounded here: tensor cores take them as they are."""
    _tell_once()
    made = functional.linear(x, _dequantize(matrix, x.dtype), bias)
    return made if out is None else out.copy_(made)


@functools.cache
def _tell_once() -> None:
    logger.info("On a GPU quantized matrices are unpacked in every step, then multiplied by torch.")
