"""Products with arranged matrices on Hopper: words go from memory to the registers that multiply them.

Called by `arranged.multiply`. Each warp loads words where the tensor cores expect its part of the left
operand, so they do not pass through shared memory. Codes become bfloat16 there, two at a time, scale and
offset included, as in Marlin (Frantar et al., 2024). Few rows of x are loaded in the same way (mma.sync: no
warp waits for another; the fewest by 4-bit matrices: `few_rows`); many are copied to shared memory (wgmma).

Gluon, which says what Triton leaves to its compiler, is experimental: see `launch.has_gluon`.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.runtime.kernels.triton.arranged import codes_of_word
from octavo.runtime.kernels.triton.few_rows import MOST_ROWS, few_rows_kernel, finish
from octavo.runtime.kernels.triton.launch import Counters, cdiv, overlapped, power_of_2

_FEW_ROWS = 16
"""Of x, which each warp loads for itself."""
_LANES = gl.constexpr(32)
_BOX = gl.constexpr(64)
"""Inputs that are copied at once."""


@triton.constexpr_function
def _unpack_4(pair: int) -> str:
    """Return code: of two words and two heads, codes 2 * pair and the next, as bfloat16, scaled.

    A head has a scale and an offset. A code under the exponent 0x43 is 128 + code; 0xc300 is -128.
    """
    text = f"prmt.b32 t, $2, $3, {('0x5410', '0x7632')[pair // 2]};"
    for j in range(2):
        head = f"${4 + 2 * j}"
        text += f"shr.b32 u, t, {4 * (pair % 2 * 2 + j)}; lop3.b32 u, u, 0x000f000f, 0x43004300, 0xea;"
        text += "mov.b32 c, 0xc300c300; add.rn.bf16x2 u, u, c;"
        text += f"prmt.b32 s, {head}, {head}, 0x1010; prmt.b32 o, {head}, {head}, 0x3232;"
        text += f"fma.rn.bf16x2 ${j}, u, s, o;"
    return "{ .reg .b32 t, c, u, s, o; " + text + " }"


@triton.constexpr_function
def _unpack_e2m1(pair: int) -> str:
    """Return code: as `_unpack_4`, of E2M1 codes; a head has a scale, twice.

    The bits of an E2M1 are those of a bfloat16 of 2^126 times less.
    """
    text = f"prmt.b32 t, $2, $3, {('0x5410', '0x7632')[pair // 2]}; mov.b32 c, 0x7e807e80;"
    for j in range(2):
        code, head = pair % 2 * 2 + j, f"${4 + 2 * j}"
        move = f"shl.b32 u, t, {6 - 4 * code};" if code < 2 else f"shr.b32 u, t, {4 * code - 6};"
        text += f"shl.b32 o, t, {12 - 4 * code}; and.b32 o, o, 0x80008000;{move}"
        text += "lop3.b32 u, u, 0x01c001c0, o, 0xea; mul.rn.bf16x2 u, u, c;"
        text += f"prmt.b32 s, {head}, {head}, 0x1010; mul.rn.bf16x2 ${j}, u, s;"
    return "{ .reg .b32 t, c, u, s, o; " + text + " }"


@triton.constexpr_function
def _unpack_8(pair: int, is_float: bool) -> str:
    """Return code: of two words and two scales, bytes 2 * pair and the next, as bfloat16, scaled.

    A byte under the exponent 0x4b is 2^23 + byte; an E4M3 shifted by 4 is a bfloat16 of 2^120 times less.
    """
    text = ""
    for j in range(2):
        byte = 2 * pair + j
        text += f"mov.b32 f, ${4 + 2 * j};"
        if is_float:
            text += f"prmt.b32 t, $2, $3, 0x{4 + byte}0{byte}0; shr.b32 v, t, 4; and.b32 t, t, 0x80008000;"
            text += "lop3.b32 t, t, v, 0x07f007f0, 0xf8; mul.f32 f, f, 0f7B800000;"
            text += f"cvt.rn.bf16x2.f32 v, f, f; mul.rn.bf16x2 ${j}, t, v;"
        else:
            text += "mov.b32 m, 0x4b000000; xor.b32 t, $2, 0x80808080; xor.b32 v, $3, 0x80808080;"
            text += f"prmt.b32 t, t, m, 0x744{byte}; prmt.b32 v, v, m, 0x744{byte};"
            text += "mov.b32 a, t; mov.b32 b, v; sub.f32 a, a, 0f4B000080; sub.f32 b, b, 0f4B000080;"
            text += f"mul.f32 a, a, f; mul.f32 b, b, f; cvt.rn.bf16x2.f32 ${j}, b, a;"
    return "{ .reg .b32 t, v, m; .reg .f32 a, b, f; " + text + " }"


_REGISTERS = gl.constexpr("=r,=r,r,r,r,r,r,r")
_TWO = gl.constexpr((tl.bfloat16,) * 2)


# fmt: off
@gluon.jit
def _head(heads, step, j: gl.constexpr, SIZE: gl.constexpr, GROUP: gl.constexpr):
    """Load scale and offset of code j of a step."""
    return gl.load(heads + (step * SIZE + j * _LANES) // GROUP)


@gluon.jit
def _four_heads(heads, step, j: gl.constexpr, SIZE: gl.constexpr, GROUP: gl.constexpr):
    first = _head(heads, step, j, SIZE, GROUP)
    second = first if GROUP >= 64 else _head(heads, step, j + 1, SIZE, GROUP)
    third = first if GROUP >= 128 else _head(heads, step, j + 2, SIZE, GROUP)
    fourth = third if GROUP >= 64 else _head(heads, step, j + 3, SIZE, GROUP)
    return first, second, third, fourth


@gluon.jit
def _load(row, lanes, step, K: gl.constexpr, PER: gl.constexpr, GROUP: gl.constexpr):
    """Load the words of a step, and what its groups have beside codes."""
    words = gl.load(row.expand_dims(1) + (lanes.expand_dims(0) + step * _LANES))
    heads = row + K // PER
    four = _four_heads(heads, step, 0, PER * _LANES, GROUP)
    if PER == 4:
        return words, four
    else:  # noqa: RET505  # other branches of a constant are compiled after a return
        more = four if GROUP >= 256 else _four_heads(heads, step, 4, PER * _LANES, GROUP)
        return words, (four[0], four[1], four[2], four[3], more[0], more[1], more[2], more[3])


@gluon.jit
def _unpack(words, heads, pair: gl.constexpr, KIND: gl.constexpr):
    """Return codes 2 * pair and the next of all words, times their scales."""
    none = gl.zeros_like(words)
    first, second = heads[2 * pair].expand_dims(1) + none, heads[2 * pair + 1].expand_dims(1) + none
    if KIND == "E4":  # the later 16 lanes have scales of their own
        lanes = gl.arange(0, _LANES, layout=gl.SliceLayout(0, words.type.layout)).expand_dims(0)
        first, second = gl.where(lanes < 16, first, first >> 16), gl.where(lanes < 16, second, second >> 16)
    given = [words, first, second]
    four: gl.constexpr = _unpack_4(pair) if KIND == "A4" else _unpack_e2m1(pair)
    code: gl.constexpr = four if codes_of_word(KIND) == 8 else _unpack_8(pair, KIND == "AF8")
    return gl.inline_asm_elementwise(code, _REGISTERS, given, _TWO, is_pure=True, pack=2)


@gluon.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x, blocks, bias, out, partial, counters, M, stride_x, stride_out, N,
    K: gl.constexpr, ROW: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, SPLIT: gl.constexpr, BIASED: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Multiply TILE_N rows of the matrix by TILE_M rows of x, over one of SPLIT parts of K.

    Rows beyond the last are loaded again instead of masked, and not stored.
    """
    PER: gl.constexpr = codes_of_word(KIND)
    PARTS: gl.constexpr = K // (PER * _LANES)
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 4)
    n = gl.program_id(0) * TILE_N + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, left))
    row = blocks.to(gl.pointer_type(gl.int32)) + gl.minimum(n, N - 1).to(gl.int64) * ROW
    lanes = gl.arange(0, _LANES, layout=gl.SliceLayout(0, left))
    m = gl.program_id(2) * TILE_M + gl.arange(0, TILE_M, layout=gl.SliceLayout(0, right))
    k = gl.arange(0, _LANES, layout=gl.SliceLayout(1, right))
    inputs = x + (gl.minimum(m, M - 1).to(gl.int64) * stride_x).expand_dims(0) + k.expand_dims(1)
    begin, end = gl.program_id(1) * PARTS // SPLIT, (gl.program_id(1) + 1) * PARTS // SPLIT
    total = gl.zeros([TILE_N, TILE_M], gl.float32, layout=layout)
    words, heads = _load(row, lanes, begin, K, PER, GROUP)
    more, more_heads = _load(row, lanes, gl.minimum(begin + 1, end - 1), K, PER, GROUP)
    if PDL:  # weights do not change: their first words are loaded before
        gdc_wait()
        gdc_launch_dependents()
    for step in range(begin, end):
        now, now_heads = words, heads
        here = inputs + step * (PER * _LANES)
        words, heads = more, more_heads
        more, more_heads = _load(row, lanes, gl.minimum(step + 2, end - 1), K, PER, GROUP)
        for pair in gl.static_range(PER // 2):
            first, second = _unpack(now, now_heads, pair, KIND)
            total = mma_v2(first, gl.load(here + 2 * pair * _LANES), total)
            total = mma_v2(second, gl.load(here + (2 * pair + 1) * _LANES), total)
    finish(total, bias, out, partial, counters, M, stride_out, N, layout, SPLIT, BIASED)


@gluon.jit
def _fetch(x, xs, full, empty, first, last, PDL: gl.constexpr):
    """Fill stages with pairs of boxes of x, as `_multiply` empties them."""
    STAGES: gl.constexpr = xs.shape[0] // 2
    if PDL:
        gdc_wait()
    for number in range(first, last):
        load = number - first
        stage = load % STAGES
        filled = full.index(stage)
        mbarrier.wait(empty.index(stage), (load // STAGES & 1) ^ 1)
        mbarrier.expect(filled, 2 * x.block_type.nbytes)
        for i in gl.static_range(2):
            place = [gl.program_id(2) * xs.shape[1], (2 * number + i) * _BOX]
            tma.async_copy_global_to_shared(x, place, filled, xs.index(2 * stage + i))


@gluon.jit
def _multiply(
    blocks, bias, out, partial, counters, M, stride_out, N, xs, full, empty, begin, end,
    K: gl.constexpr, ROW: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, TILE_N: gl.constexpr,
    SPLIT: gl.constexpr, BIASED: gl.constexpr, num_warps: gl.constexpr,
):
    """Multiply what comes; codes are unpacked while the product of those before runs."""
    PER: gl.constexpr = codes_of_word(KIND)
    STAGES: gl.constexpr = xs.shape[0] // 2
    TILE_M: gl.constexpr = xs.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, TILE_M, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    n = gl.program_id(0) * TILE_N + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, left))
    row = blocks.to(gl.pointer_type(gl.int32)) + gl.minimum(n, N - 1).to(gl.int64) * ROW
    lanes = gl.arange(0, _LANES, layout=gl.SliceLayout(0, left))
    total = gl.zeros([TILE_N, TILE_M], gl.float32, layout=layout)
    words, heads = _load(row, lanes, begin, K, PER, GROUP)
    AHEAD: gl.constexpr = 2 if TILE_M <= 128 else 1  # steps; registers do not suffice for more
    if AHEAD == 2:
        more, more_heads = _load(row, lanes, gl.minimum(begin + 1, end - 1), K, PER, GROUP)
    first, second = _unpack(words, heads, 0, KIND)
    load = 0
    for step in range(begin, end):
        now, now_heads = words, heads
        if AHEAD == 2:
            words, heads = more, more_heads
            more, more_heads = _load(row, lanes, gl.minimum(step + 2, end - 1), K, PER, GROUP)
        else:
            words, heads = _load(row, lanes, gl.minimum(step + 1, end - 1), K, PER, GROUP)
        for half in gl.static_range(PER // 4):
            stage = load % STAGES
            mbarrier.wait(full.index(stage), load // STAGES & 1)
            box = xs.index(2 * stage)
            total = warpgroup_mma(first, box.slice(0, 32, dim=1).permute((1, 0)), total, is_async=True)
            total = warpgroup_mma(second, box.slice(32, 32, dim=1).permute((1, 0)), total, is_async=True)
            third, fourth = _unpack(now, now_heads, 2 * half + 1, KIND)
            box = xs.index(2 * stage + 1)
            total = warpgroup_mma(third, box.slice(0, 32, dim=1).permute((1, 0)), total, is_async=True)
            total = warpgroup_mma(fourth, box.slice(32, 32, dim=1).permute((1, 0)), total, is_async=True)
            if half == PER // 4 - 1:
                next_first, next_second = _unpack(words, heads, 0, KIND)
            else:
                next_first, next_second = _unpack(now, now_heads, 2 * half + 2, KIND)
            total, _, _, _, _ = warpgroup_mma_wait(0, deps=(total, first, second, third, fourth))
            first, second = next_first, next_second
            mbarrier.arrive(empty.index(stage))
            load += 1
    finish(total, bias, out, partial, counters, M, stride_out, N, layout, SPLIT, BIASED)


@gluon.jit(do_not_specialize=["M"])
def _many_rows_kernel(
    x, blocks, bias, out, partial, counters, M, stride_out, N,
    K: gl.constexpr, ROW: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, TILE_N: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, BIASED: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Multiply TILE_N rows of the matrix by a tile of x, a descriptor, over one of SPLIT parts of K."""
    LOADS: gl.constexpr = codes_of_word(KIND) // 4
    PARTS: gl.constexpr = K // (LOADS * 2 * _BOX)
    xs = gl.allocate_shared_memory(x.dtype, [2 * STAGES] + x.block_type.shape, x.layout)  # noqa: RUF005  # no star in Gluon
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    begin, end = gl.program_id(1) * PARTS // SPLIT, (gl.program_id(1) + 1) * PARTS // SPLIT
    gl.warp_specialize(
        [
            (_multiply, (blocks, bias, out, partial, counters, M, stride_out, N, xs, full, empty, begin, end,
                         K, ROW, KIND, GROUP, TILE_N, SPLIT, BIASED, num_warps)),
            (_fetch, (x, xs, full, empty, begin * LOADS, end * LOADS, PDL)),
        ],
        worker_num_warps=[1],
        worker_num_regs=[24],
    )
    if PDL:
        gdc_launch_dependents()
# fmt: on


def product(
    counters: Counters, x: Tensor, blocks: Tensor, kind: dict[str, Any], bias: Tensor | None, out: Tensor
) -> Tensor:
    """See linear.BlockMatmul; of an arranged matrix of `kind` (see arranged). x: [M, K], bfloat16, M > 0."""
    (m, k), n = x.shape, len(blocks)
    tile = tiles(m, n, k, kind["KIND"])
    splits, tile_m = tile["SPLIT"], tile["TILE_M"]
    grid = cdiv(n, tile["TILE_N"]), splits, cdiv(m, tile_m)
    partial = x.new_empty((splits, m, n), dtype=torch.float32) if splits > 1 else out
    counter = counters.on(x.device, grid[0] * grid[2]) if splits > 1 else out
    tensors = blocks, out if bias is None else bias, out, partial, counter, m
    how = kind | tile | {"BIASED": bias is not None} | overlapped()
    del how["TILE_M"]
    if how["KIND"] == "A4" and m <= MOST_ROWS:
        del how["KIND"]
        few_rows_kernel[grid](x, *tensors, x.stride(0), out.stride(0), n, **how)
    elif "STAGES" in tile:
        layout = gl.NVMMASharedLayout(128, 16, rank=2)
        boxes = TensorDescriptor.from_tensor(x, [tile_m, _BOX.value], layout)
        _many_rows_kernel[grid](boxes, *tensors, out.stride(0), n, **how)
    else:
        _few_rows_kernel[grid](x, *tensors, x.stride(0), out.stride(0), n, TILE_M=tile_m, **how)
    return out


def can_multiply(x: Tensor, kind: str, num_inputs: int) -> bool:
    """Return True for rows that are faster here than unpacked ones, which torch multiplies."""
    can_copy = len(x) <= _FEW_ROWS or (x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0)
    return 0 < len(x) <= most_rows(kind) and can_copy and num_inputs % 256 == 0


def most_rows(kind: str) -> int:
    """Return how many rows are multiplied here sooner than by torch, as measured on an H100."""
    return 512 if codes_of_word(kind) == 8 else 256


@functools.cache
def tiles(num_rows: int, n: int, k: int, kind: str) -> dict[str, int]:
    """Choose tile and split, as measured on an H100."""
    num_parts = k // (32 * codes_of_word(kind))
    num_tiles = cdiv(n, 128)
    if kind == "A4" and num_rows <= MOST_ROWS:
        few = {"TILE_M": MOST_ROWS, "num_warps": 4}
        if num_parts <= 16:  # no sum leaves a program
            return few | {"TILE_N": 16, "SPLIT": 1}
        return few | {"TILE_N": 32, "SPLIT": cdiv(num_parts, 8), "maxnreg": 128}
    if num_rows <= _FEW_ROWS:
        tile_m = max(8, power_of_2(num_rows))
        tile_n, warps = (128, 4) if codes_of_word(kind) == 8 or tile_m == 16 else (256, 8)
        split = max(1, min(128 * 2 * 132 // tile_n // cdiv(n, tile_n), num_parts))
        return {"TILE_M": tile_m, "TILE_N": tile_n, "SPLIT": split, "num_warps": warps}
    tile_m = min(256 if num_tiles * cdiv(num_rows, 256) >= 132 else 128, power_of_2(num_rows))
    split = max(1, min(132 // (num_tiles * cdiv(num_rows, tile_m)), num_parts // 2))
    stages = min(4, 6 * 128 // tile_m)
    return {"TILE_M": tile_m, "TILE_N": 128, "SPLIT": split, "STAGES": stages, "num_warps": 8}
