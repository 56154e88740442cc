"""Packed matrices as tensor cores take them: arranged once after loading, unpacked inside the product.

A row of blocks has scales between its weights, at odd addresses. Arranged, it has all its weights as words of
32 bits first, then a word for each group: bfloat16 scale and offset of 4-bit codes, a float32 scale of bytes.
Code j of 32 neighbouring words are 32 neighbouring columns. So every copy is 16 bytes wide, inputs are tiles
as they are, and a group is one operand of a product: codes, whole numbers, become operands in the registers
that loaded them, and scales multiply sums. Codes of 4 bits turn to bfloat16 two at a time: as mantissas under
an exponent that puts them from 128 on. A product with ones, which the tensor cores have time for, takes that
back, and adds the offsets. E2M1 codes (MXFP4, NVFP4) become operands with their scales, of 16 inputs each.

For activations in bfloat16. On Hopper, `register_unpack` multiplies. Many rows are multiplied by torch.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.block_types import ARRANGED_TYPES
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.blocks import scales_and_mins
from octavo.runtime.kernels.ref.group_blocks import nibbles
from octavo.runtime.kernels.triton import eight_bits
from octavo.runtime.kernels.triton.launch import (
    Counters,
    card,
    cdiv,
    has_gluon,
    is_last,
    overlapped,
    power_of_2,
    release,
    wait,
)

_MOST_ROWS = 64  # multiplied here; of more torch does it
_ROWS_AT_ONCE = 2048  # arranged: bounds the memory for that
_WIDTH = 1024  # values that one unpacking program makes
_ALIGNED = 256  # columns by which 16 bytes begin each row, and its scales
_PROGRAMS = 2 * 132
_LANES = tl.constexpr(32)
"""Words whose codes are neighbours."""
_NIBBLES = "prmt.b32 t0, $8, $9, 0x5410; prmt.b32 t1, $8, $9, 0x7632; mov.b32 e, 0x43004300;"
for _j in range(8):
    _NIBBLES += f"shr.b32 u, t{_j // 4}, {_j % 4 * 4}; lop3.b32 ${_j}, u, 0x000f000f, e, 0xea;"
EIGHT_CODES = tl.constexpr("{ .reg .b32 t0, t1, e, u; " + _NIBBLES + " }")
"""Of two words: codes 0 … 7 of both, + 128, in bfloat16."""
EIGHT_REGISTERS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r")
EIGHT_TYPES = tl.constexpr((tl.bfloat16,) * 8)


@triton.constexpr_function
def codes_of_word(kind: str) -> int:
    """Return how many codes of a kind 32 bits hold."""
    return 8 if kind in ("A4", "E4") else 4


# fmt: off
@triton.jit
def e2m1(code):
    """Return what 4 bits stand for: those of a float16 of 2^14 times less."""
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.uint16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def _code(words, j, KIND: tl.constexpr):
    """Return code j of words as float32: of 4 bits + 128."""
    if KIND == "A4":
        return ((words >> (4 * j)) & 15).to(tl.float32) + 128.0
    elif KIND == "A8":  # noqa: RET505  # other branches of a constant are compiled after a return
        return (words << (24 - 8 * j) >> 24).to(tl.float32)
    elif KIND == "E4":
        return e2m1((words >> (4 * j)) & 15)
    else:
        bits = words >> (8 * j)
        half = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
        return half.to(tl.float32) * 256.0


@triton.jit
def _scales(heads, KIND: tl.constexpr):
    """Return scales and what must be added for each unit of input."""
    if KIND == "A4":
        scale = (heads << 16).to(tl.float32, bitcast=True)
        return scale, (heads & -65536).to(tl.float32, bitcast=True) - 128.0 * scale
    elif KIND == "E4":  # noqa: RET505  # as above
        return (heads << 16).to(tl.float32, bitcast=True), (heads & -65536).to(tl.float32, bitcast=True)
    else:
        scale = heads.to(tl.float32, bitcast=True)
        return scale, scale


@triton.jit
def _head(row, step, j: tl.constexpr, n, N, SIZE: tl.constexpr, GROUP: tl.constexpr):
    return tl.load(row + (step * (SIZE // GROUP) + j * _LANES // GROUP), mask=n < N, other=0)


@triton.jit
def _heads(row, step, n, N, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Load what all groups of a step have beside codes."""
    a, b = _head(row, step, 0, n, N, SIZE, GROUP), _head(row, step, 1, n, N, SIZE, GROUP)
    c, d = _head(row, step, 2, n, N, SIZE, GROUP), _head(row, step, 3, n, N, SIZE, GROUP)
    if SIZE == 4 * _LANES:
        return a, b, c, d
    else:  # noqa: RET505  # as above
        e, f = _head(row, step, 4, n, N, SIZE, GROUP), _head(row, step, 5, n, N, SIZE, GROUP)
        g, h = _head(row, step, 6, n, N, SIZE, GROUP), _head(row, step, 7, n, N, SIZE, GROUP)
        return a, b, c, d, e, f, g, h


@triton.jit(do_not_specialize=["M"])
def _arranged_kernel(
    x, blocks, bias, out, partial, counters, M, stride_x, stride_out, N,
    K: tl.constexpr, ROW: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, SPLIT: tl.constexpr, BIASED: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply TILE_N rows of the matrix, the left operand, by all M rows, over one of SPLIT parts of K."""
    PER: tl.constexpr = codes_of_word(KIND)
    SIZE: tl.constexpr = PER * _LANES
    NUM_PARTS: tl.constexpr = K // SIZE
    m, n = tl.arange(0, TILE_M), tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    lane, part = tl.arange(0, _LANES), tl.program_id(1)
    rows, outputs = (m < M)[:, None], (n < N)[None, :]
    row = blocks.to(tl.pointer_type(tl.int32)) + n.to(tl.int64) * ROW
    matrix, inputs = row[:, None] + lane[None, :], x + (m * stride_x)[:, None] + lane[None, :]
    total = tl.zeros([TILE_N, TILE_M], tl.float32)
    ones = tl.full([TILE_N, _LANES], 1.0, DOT)
    wait(PDL)
    release(PDL)
    end = (part + 1) * NUM_PARTS // SPLIT
    heads = _heads(row + K // PER, part * NUM_PARTS // SPLIT, n, N, SIZE, GROUP)
    for step in range(part * NUM_PARTS // SPLIT, end):
        now, following = heads, tl.minimum(step + 1, end - 1)
        heads = _heads(row + K // PER, following, n, N, SIZE, GROUP)
        words = tl.load(matrix + step * _LANES, mask=(n < N)[:, None], other=0)
        if KIND == "A4" and PACKED:
            codes = tl.inline_asm_elementwise(EIGHT_CODES, EIGHT_REGISTERS, [words], EIGHT_TYPES, True, 2)
        for j in tl.static_range(PER):
            scale, offset = _scales(now[j], KIND)
            own = tl.trans(tl.load(inputs + (step * SIZE + j * _LANES), mask=rows, other=0.0).to(DOT))
            if KIND == "A4" and PACKED:
                product = tl.dot(codes[j], own)
            elif KIND == "E4":
                scales = tl.where((lane < 16)[None, :], scale[:, None], offset[:, None])
                total += tl.dot((_code(words, j, KIND) * scales).to(DOT), own)
            else:
                product = tl.dot(_code(words, j, KIND).to(DOT), own)
            if KIND != "E4":
                total += product * scale[:, None]
            if KIND == "A4":
                total += tl.dot(ones, own) * offset[:, None]
    total = tl.trans(total)
    if SPLIT > 1:
        place = m[:, None] * N + n[None, :]
        tl.store(partial + part * M * N + place, total, mask=rows & outputs)
        if not is_last(counters + tl.program_id(0), SPLIT):
            return
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        for index in tl.static_range(SPLIT):
            total += tl.load(
                partial + index * M * N + place, mask=rows & outputs, other=0.0, cache_modifier=".cg"
            )
    if BIASED:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    target = out + (m * stride_out)[:, None] + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=rows & outputs)


@triton.jit
def _unpack_kernel(
    blocks, out, K: tl.constexpr, ROW: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    PER: tl.constexpr = codes_of_word(KIND)
    SIZE: tl.constexpr = PER * _LANES
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    matrix = blocks.to(tl.pointer_type(tl.int32)) + row * ROW
    inside = column < K
    words = tl.load(matrix + (column // SIZE * _LANES + column % _LANES), mask=inside, other=0)
    scale, offset = _scales(tl.load(matrix + (K // PER + column // GROUP), mask=inside, other=0), KIND)
    if KIND == "E4":
        scale = tl.where(column % _LANES < 16, scale, offset)
    values = _code(words, column % SIZE // _LANES, KIND) * scale
    if KIND == "A4":
        values += offset
    tl.store(out + row * K + column, values.to(out.dtype.element_ty), mask=inside)
# fmt: on


def arrange(matrix: Packed, dtype: torch.dtype) -> Packed:
    """Return the matrix for activations of `dtype`: arranged, where that pays; see LinearKernels.arrange."""
    if matrix.input_precision in ("float8", "int8") and dtype in (torch.bfloat16, torch.float16):
        made = eight_bits.arrange(matrix)
        if made is not None:
            return made
    if dtype != torch.bfloat16 or _group(matrix) is None or matrix.num_inputs % _ALIGNED:
        return matrix
    parts = [_arrange(matrix._replace(blocks=part)) for part in matrix.blocks.split(_ROWS_AT_ONCE)]
    kind, size = _group(matrix) or ("", 0)
    made = matrix._replace(blocks=torch.cat(parts), type_name=f"{kind}_{size}")
    return _with_groups_of_128(made) if size == 64 else made


def _with_groups_of_128(matrix: Packed) -> Packed:
    """Return the matrix with half as many scales, if each two are equal."""
    (kind, _, _), k = matrix.type_name.partition("_"), matrix.num_inputs
    words = 4 * k // codes_of_word(kind)
    heads = matrix.blocks[:, words:].contiguous().view(torch.int32)
    if k % 512 or (heads[:, 0::2] != heads[:, 1::2]).any():
        return matrix
    halved = heads[:, 0::2].contiguous().view(torch.uint8)
    blocks = torch.cat([matrix.blocks[:, :words], halved], 1)
    return matrix._replace(blocks=blocks, type_name=f"{kind}_128")


def _group(matrix: Packed) -> tuple[str, int] | None:
    """Return how a type is arranged, and how many weights have a scale; None for types that stay."""
    name, _, size = matrix.type_name.partition("_")
    if matrix.type_name in ("Q4_0", "Q4_1", "Q4_K", "Q8_0"):
        return "A8" if name == "Q8" else "A4", 32
    if name in ("MXFP4", "NV4"):
        return "E4", 32
    kind = {"U4": "A4", "S8": "A8", "F8": "AF8"}.get(name)
    return (kind, int(size)) if kind else None


def _arrange(matrix: Packed) -> Tensor:
    """Return rows of words, then of scales, and offsets if there are."""
    rows, kind = len(matrix.blocks), matrix.kind
    codes, scales, offsets = _read(matrix.type_name, matrix.blocks.reshape(-1, kind.num_bytes))
    if offsets is not None:
        codes = codes.reshape(rows, -1, 8, _LANES.value)
        codes = codes[:, :, 0::2] | codes[:, :, 1::2] << 4
        heads = torch.stack([scales.reshape(rows, -1), offsets.reshape(rows, -1)], -1).bfloat16().flatten(1)
    else:
        heads = scales.reshape(rows, -1)
    words = codes.reshape(rows, -1, 4, _LANES.value).transpose(2, 3).reshape(rows, -1)
    return torch.cat([words.view(torch.uint8), heads.view(torch.uint8)], 1)


def _read(name: str, b: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes, one byte each, scales and offsets of blocks; scales are rounded before offsets follow.

    Of E2M1 codes: scales of the first 16 of 32, and of the others.
    """

    def halves(start: int, end: int) -> Tensor:
        return b[:, start:end].contiguous().view(torch.float16).float()

    if name == "MXFP4":
        scales = (b[:, 0].int() << 23).view(torch.float32)
        return nibbles(b[:, 1:]), scales, scales
    if name == "NV4_64":
        factors = b[:, 4:8].contiguous().view(torch.float8_e4m3fn).float()
        scales = b[:, :4].contiguous().view(torch.float32) * factors
        return nibbles(b[:, 8:]), scales[:, 0::2], scales[:, 1::2]
    if name.startswith(("S8", "F8")):
        return b[:, 4:], b[:, :4].contiguous().view(torch.float32), None
    if name == "Q8_0":
        return b[:, 2:], halves(0, 2), None
    if name == "Q4_K":
        scales, mins = scales_and_mins(b[:, 4:16])
        codes = nibbles(b[:, 16:].reshape(-1, 4, 32))
        return codes, halves(0, 2) * scales[..., 0], -halves(2, 4) * mins[..., 0]
    scales = halves(0, 2)
    rounded = scales.bfloat16().float()
    if name == "Q4_0":
        return nibbles(b[:, 2:]), scales, -8 * rounded
    if name == "Q4_1":
        return nibbles(b[:, 4:]), scales, halves(2, 4)
    return nibbles(b[:, 4:]), scales, -halves(2, 4) * rounded


def is_arranged(matrix: Packed) -> bool:
    """Return True for matrices that `arrange` made."""
    return matrix.type_name in ARRANGED_TYPES


def explain(matrix: Packed) -> str:
    """See LinearKernels.explain."""
    most = _MOST_ROWS
    if has_gluon():
        from octavo.runtime.kernels.triton import register_unpack

        most = register_unpack.most_rows(_kind(matrix)["KIND"])
    how = "in registers (Gluon)" if has_gluon() else "in tiles (Triton)"
    return f"up to {most} rows unpacked {how}; more by torch, of an unpacked copy"


def unpack(matrix: Packed, dtype: torch.dtype) -> Tensor:
    """Return the rows of an arranged matrix."""
    rows, k = len(matrix.blocks), matrix.num_inputs
    out = torch.empty((rows, k), dtype=dtype, device=matrix.blocks.device)
    if rows:
        _unpack_kernel[(rows, cdiv(k, _WIDTH))](matrix.blocks, out, **_kind(matrix), WIDTH=_WIDTH)
    return out


def multiply(
    counters: Counters, x: Tensor, matrix: Packed, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """See linear.BlockMatmul; of an arranged matrix."""
    (m, k), n = x.shape, len(matrix.blocks)
    if has_gluon() and x.dtype == torch.bfloat16:
        from octavo.runtime.kernels.triton import register_unpack

        if register_unpack.can_multiply(x, _kind(matrix)["KIND"], k):
            out = x.new_empty((m, n)) if out is None else out
            return register_unpack.product(counters, x, matrix.blocks, _kind(matrix), bias, out)
    if not 0 < m <= _MOST_ROWS or x.dtype != torch.bfloat16:
        made = functional.linear(x, unpack(matrix, x.dtype), bias)
        return made if out is None else out.copy_(made)
    out = x.new_empty((m, n)) if out is None else out
    tile = tiles(m, n, k, _kind(matrix)["KIND"])
    splits, num_tiles = tile["SPLIT"], cdiv(n, tile["TILE_N"])
    partial = x.new_empty((splits, m, n), dtype=torch.float32) if splits > 1 else out
    counter = counters.on(x.device, num_tiles) if splits > 1 else out
    tensors = x, matrix.blocks, out if bias is None else bias, out, partial, counter
    sizes = m, x.stride(0), out.stride(0), n
    known = card()
    is_nvidia = known is not None and known.name.startswith("sm")  # whose assembler the codes are written in
    how = {"PACKED": is_nvidia, "DOT": tl.float32 if known is None else tl.bfloat16}
    kind = _kind(matrix) | {"BIASED": bias is not None}
    _arranged_kernel[(num_tiles, splits)](*tensors, *sizes, **how, **kind, **tile, **overlapped())
    return out


def _kind(matrix: Packed) -> dict[str, Any]:
    kind, _, size = matrix.type_name.partition("_")
    return {"KIND": kind, "GROUP": int(size), "K": matrix.num_inputs, "ROW": matrix.blocks.shape[1] // 4}


@functools.cache
def tiles(num_rows: int, n: int, k: int, kind: str) -> dict[str, Any]:
    """Choose tile and split, as measured on an H200: many small programs."""
    num_parts = k // codes_of_word(kind) // _LANES.value
    tile_m = max(8, power_of_2(num_rows))
    tile_n, warps = (32, 2) if tile_m == 16 else (64, 4)
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "SPLIT": max(1, min(_PROGRAMS // cdiv(n, tile_n), num_parts // 4)),
        "num_warps": warps,
        "num_stages": 3,
    }
