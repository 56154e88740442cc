"""Products of 8-bit weights with inputs that are rounded to 8 bits: FP8 by FP8 and int8 by int8 (W8A8).

Weights are bytes [N, K] with scales beside them: one per output, or one per 128 inputs (and 128 outputs, as
DeepSeek has it). Each row of inputs is rounded by the largest of its numbers, in groups of 128 where weights
have groups. So what a row is rounded to does not depend on the rows beside it, nor on their number.

Few rows are multiplied in the tiles of `matmul` (the matrix is the left operand, inputs are shared out over
programs whose sums are added in fixed order), sums of FP8 products in float32 from 128 inputs on; sums of
int8 products are exact. Of many rows, FP8 products are cuBLAS's, int8 products those of a kernel with tiles
that the copy engine fetches.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.base.cards import CARDS
from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.blocks import BYTES
from octavo.runtime.kernels.triton.elementwise import KINDS, act
from octavo.runtime.kernels.triton.launch import (
    WAVE,
    Counters,
    card,
    cdiv,
    fits,
    has_copy_engine,
    is_last,
    overlapped,
    power_of_2,
    release,
    splits_of_inputs,
    stages,
    wait,
)

GROUP = 128
_FEW_ROWS = 64  # more FP8 rows are cuBLAS's
_MORE_ROWS = 128  # more int8 rows are copied in tiles
_LARGEST = {"F8": 448.0, "S8": 127.0}


# fmt: off
@triton.jit
def _round_kernel(
    x, codes, scales, places, stride_x, stride_row, stride_group, largest,
    K: tl.constexpr, PARTS: tl.constexpr, IN_GROUPS: tl.constexpr, IS_FLOAT: tl.constexpr, GATE: tl.constexpr,
    COPIES: tl.constexpr, PDL: tl.constexpr,
):
    """Round one row: PARTS times 128 inputs. Strides: of scales, one of a row if not IN_GROUPS.

    GATE: the number of an activation, of which the row has gates, then as many values; -1 = none
    COPIES: of a row, each at its place, -1 = none; 0 = rows keep theirs
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, PARTS)
    place = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    wait(PDL)
    release(PDL)
    source = x + row * stride_x + place
    value = tl.load(source, mask=place < K, other=0.0).to(tl.float32)
    if GATE >= 0:
        value = act(value, GATE) * tl.load(source + K, mask=place < K, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(value), 1)
    if not IN_GROUPS:
        top = tl.zeros([PARTS], tl.float32) + tl.max(top, 0)
    scale = tl.maximum(top, 1e-20) * (1.0 / largest)
    value = value * (1.0 / scale)[:, None]
    value = tl.minimum(tl.maximum(value, -448.0), 448.0) if IS_FLOAT else tl.floor(value + 0.5)
    value = value.to(codes.dtype.element_ty)
    first = group * 128 < K if IN_GROUPS else group == 0
    for copy in tl.static_range(COPIES if COPIES > 0 else 1):
        own = tl.load(places + row * COPIES + copy).to(tl.int64) if COPIES > 0 else row
        tl.store(codes + own * K + place, value, mask=(place < K) & (own >= 0))
        tl.store(scales + own * stride_row + group * stride_group, scale, mask=first & (own >= 0))


@triton.jit(do_not_specialize=["M"])
def _tile_kernel(
    x, weight, x_scales, scales, bias, out, partial, counters, M, stride_out, N,
    K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, IS_FLOAT: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr,
):
    """Multiply TILE_N rows of the matrix by TILE_M rows of x, over one of SPLIT parts of K.

    ROWS: outputs that share a scale in every 128 inputs; 0 = each output has one scale.
    """
    IN_GROUPS: tl.constexpr = ROWS > 0
    m = tl.program_id(2) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    part_size: tl.constexpr = (K + SPLIT * TILE_K - 1) // (SPLIT * TILE_K) * TILE_K
    part = tl.program_id(1)
    column = part * part_size + tl.arange(0, TILE_K)
    rows, outputs = (m < M)[:, None], (n < N)[None, :]
    weights, inputs = weight + n.to(tl.int64)[:, None] * K, x + m.to(tl.int64)[:, None] * K
    if IN_GROUPS or IS_FLOAT:
        total = tl.zeros([TILE_N, TILE_M], tl.float32)
    else:
        total = tl.zeros([TILE_N, TILE_M], tl.int32)
    wait(PDL)
    release(PDL)
    for start in range(0, part_size, TILE_K):
        k = start + column
        inside = (k < K)[None, :]
        w = tl.load(weights + k[None, :], mask=(n < N)[:, None] & inside, other=0.0)
        a = tl.load(inputs + k[None, :], mask=rows & inside, other=0.0)
        if IN_GROUPS:
            group = (part * part_size + start) // 128
            there = group * 128 < K
            product = tl.dot(w, tl.trans(a), out_dtype=tl.float32 if IS_FLOAT else tl.int32).to(tl.float32)
            own = tl.load(scales + n // ROWS * (K // 128) + group, mask=(n < N) & there, other=0.0)
            product *= tl.load(x_scales + group * M + m, mask=(m < M) & there, other=0.0)[None, :]
            total += product * own[:, None]
        elif IS_FLOAT:
            total += tl.dot(w, tl.trans(a))
        else:
            total = tl.dot(w, tl.trans(a), total, out_dtype=tl.int32)
    total = tl.trans(total)
    if SPLIT > 1:
        place = m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(partial + part * M * N + place, total, mask=rows & outputs)
        if not is_last(counters + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0), SPLIT):
            return
        total = tl.zeros_like(total)
        for index in tl.static_range(SPLIT):
            total += tl.load(
                partial + index * M * N + place, mask=rows & outputs, other=0, cache_modifier=".cg"
            )
    total = total.to(tl.float32)
    if not IN_GROUPS:
        total *= tl.load(x_scales + m, mask=m < M, other=0.0)[:, None]
        total *= tl.load(scales + n, mask=n < N, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    target = out + m.to(tl.int64)[:, None] * stride_out + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=rows & outputs)


@triton.jit(do_not_specialize=["M"])
def _copied_tile_kernel(
    x, weight, x_scales, scales, bias, out, M, stride_out, N,
    K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, ROWS: tl.constexpr,
    IS_FLOAT: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr,
):
    """Multiply a tile of x by one of the matrix, both descriptors; neighbours in time share their tiles."""
    IN_GROUPS: tl.constexpr = ROWS > 0
    program, num_m, num_n = tl.program_id(0), tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    band = program // (8 * num_n) * 8
    height = tl.minimum(num_m - band, 8)
    tile_m, tile_n = band + program % (8 * num_n) % height, program % (8 * num_n) // height
    m, n = tile_m * TILE_M + tl.arange(0, TILE_M), tile_n * TILE_N + tl.arange(0, TILE_N)
    if IN_GROUPS or IS_FLOAT:
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
    else:
        total = tl.zeros([TILE_M, TILE_N], tl.int32)
    wait(PDL)
    release(PDL)
    for start in range(0, K, TILE_K):
        a = x.load([tile_m * TILE_M, start])
        w = weight.load([tile_n * TILE_N, start])
        if IN_GROUPS:
            product = tl.dot(a, tl.trans(w), out_dtype=tl.float32 if IS_FLOAT else tl.int32).to(tl.float32)
            group = start // 128
            own = tl.load(scales + n // ROWS * (K // 128) + group, mask=n < N, other=0.0)
            given = tl.load(x_scales + group * M + m, mask=m < M, other=0.0)
            total += product * (given[:, None] * own[None, :])
        elif IS_FLOAT:
            total = tl.dot(a, tl.trans(w), total)
        else:
            total = tl.dot(a, tl.trans(w), total, out_dtype=tl.int32)
    total = total.to(tl.float32)
    if not IN_GROUPS:
        total *= tl.load(x_scales + m, mask=m < M, other=0.0)[:, None]
        total *= tl.load(scales + n, mask=n < N, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    target = out + m.to(tl.int64)[:, None] * stride_out + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
# fmt: on


def arrange(matrix: Packed) -> Packed | None:
    """Return blocks as bytes with scales beside them; None where scales serve fewer than 128 inputs."""
    name, _, size = matrix.type_name.partition("_")
    n, k = len(matrix.blocks), matrix.num_inputs
    if name not in BYTES or not size or k % GROUP or not can_multiply(name):
        return None
    parts = matrix.blocks.view(n, k // int(size), -1)
    scales = parts[:, :, :4].contiguous().view(torch.float32)[..., 0]
    codes = parts[:, :, 4:].reshape(n, k)
    if (scales == scales[:, :1]).all():
        return Packed(codes, name, matrix.input_precision, scales[:, 0].contiguous())
    groups = scales.view(n, k // GROUP, -1)
    if (groups != groups[..., :1]).any():
        return None
    groups = groups[..., 0].contiguous()
    if (
        n % GROUP == 0
        and (groups.view(-1, GROUP, k // GROUP) == groups.view(-1, GROUP, k // GROUP)[:, :1]).all()
    ):
        groups = groups[::GROUP].contiguous()
    return Packed(codes, name, matrix.input_precision, groups)


def explain(matrix: Packed) -> str:
    """See LinearKernels.explain."""
    if matrix.type_name == "F8" and _can_scale(matrix) and _has_cublas():
        return f"FP8 by FP8; up to {_FEW_ROWS} rows in tiles (Triton), more by cuBLAS"
    kind = "FP8 by FP8" if matrix.type_name == "F8" else "int8 by int8"
    many = "copied by TMA" if has_copy_engine() else "the same"
    return f"{kind}; up to {_MORE_ROWS} rows in tiles (Triton), more in larger ones, {many}"


def _can_scale(matrix: Packed) -> bool:
    """Return True if cuBLAS takes the shape and scales of an FP8 matrix."""
    assert matrix.scales is not None
    n, k = matrix.blocks.shape
    in_blocks = len(matrix.scales) * GROUP == n and k % (4 * GROUP) == 0
    return n % 16 == 0 and (matrix.scales.dim() == 1 or in_blocks)


def can_multiply(name: str) -> bool:
    """Return True if tensor cores take bytes of a kind: FP8 from Ada on, int8 from Ampere on."""
    known = card()
    return known is None or (known.has_fp8 if name == "F8" else known.has_int8)


def round_inputs(
    x: Tensor, name: str, *, in_groups: bool, gate: Activation | None = None
) -> tuple[Tensor, Tensor]:
    """Return x [M, K], token-strided, in bytes of a kind, and scales: [M], or [K / 128, M] in groups.

    gate: x has gates, then as many values; what is rounded is activation(gates) * values
    """
    m, k = x.shape[0], x.shape[1] // (1 if gate is None else 2)
    codes = torch.empty((m, k), dtype=BYTES[name], device=x.device)
    scales = torch.empty((k // GROUP, m) if in_groups else (m,), dtype=torch.float32, device=x.device)
    parts = power_of_2(cdiv(k, GROUP))
    kind = {"K": k, "PARTS": parts, "IN_GROUPS": in_groups, "IS_FLOAT": name == "F8"}
    kind["GATE"] = -1 if gate is None else KINDS[gate]
    given = x, codes, scales, codes, x.stride(0), 1, m if in_groups else 0, _LARGEST[name]
    _round_kernel[(m,)](*given, COPIES=0, num_warps=max(4, min(16, parts // 8)), **kind, **overlapped())
    return codes, scales


def round_copies(x: Tensor, places: Tensor, number: int, *, in_groups: bool) -> tuple[Tensor, Tensor]:
    """Return each row of x in FP8 at its places [M, copies], -1 = none, of `number`; scales [number, groups].

    What is at no row's place may be anything.
    """
    k, parts = x.shape[1], power_of_2(cdiv(x.shape[1], GROUP))
    codes = torch.empty((number, k), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((number, k // GROUP if in_groups else 1), dtype=torch.float32, device=x.device)
    kind = {"K": k, "PARTS": parts, "IN_GROUPS": in_groups, "IS_FLOAT": True, "COPIES": places.shape[1]}
    given = x, codes, scales, places, x.stride(0), scales.shape[1], 1, _LARGEST["F8"]
    _round_kernel[(len(x),)](*given, GATE=-1, num_warps=min(4, max(1, parts // 4)), **kind, **overlapped())
    return codes, scales


def multiply(
    counters: Counters, x: Tensor, matrix: Packed, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """See linear.BlockMatmul; of a matrix that `arrange` made, whose inputs are rounded."""
    assert matrix.scales is not None
    if len(x) == 0:
        return x.new_empty((0, len(matrix.blocks))) if out is None else out
    rounded = round_inputs(x, matrix.type_name, in_groups=matrix.scales.dim() == 2)
    return _product(counters, *rounded, matrix, bias, x.dtype, out)


def feed_forward(counters: Counters, x: Tensor, up: Packed, gate: Activation, down: Packed) -> Tensor | None:
    """See linear.BlockFeedForward; the activation is rounded where it is computed."""
    if up.scales is None or down.scales is None:
        return None
    wide, in_groups = multiply(counters, x, up), down.scales.dim() == 2
    if len(x) == 0:
        return x.new_empty((0, len(down.blocks)))
    rounded = round_inputs(wide, down.type_name, in_groups=in_groups, gate=gate)
    return _product(counters, *rounded, down, None, x.dtype)


def _product(
    counters: Counters, codes: Tensor, x_scales: Tensor, matrix: Packed, bias: Tensor | None,
    dtype: torch.dtype, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply by the kernel that was fastest on an H100."""
    (m, k), n, scales = codes.shape, len(matrix.blocks), matrix.scales
    assert scales is not None
    weight, is_float, in_groups = matrix.blocks.view(codes.dtype), matrix.type_name == "F8", scales.dim() == 2
    rows = n // len(scales) if in_groups else 0
    if is_float and m > _FEW_ROWS and _can_scale(matrix) and _has_cublas():
        made = _cublas(codes, weight, x_scales, scales, bias, dtype)
        return made if out is None else out.copy_(made)
    out = torch.empty((m, n), dtype=dtype, device=codes.device) if out is None else out
    tensors = x_scales, scales, out if bias is None else bias, out
    kind: dict[str, Any] = {"K": k, "ROWS": rows, "IS_FLOAT": is_float, "BIASED": bias is not None}
    if m > _MORE_ROWS and cdiv(m, 128) * cdiv(n, 128) >= WAVE and has_copy_engine():
        tile = copied_tiles(m, n, in_groups)
        a = TensorDescriptor.from_tensor(codes, [tile["TILE_M"], tile["TILE_K"]])
        w = TensorDescriptor.from_tensor(weight, [tile["TILE_N"], tile["TILE_K"]])
        grid = (cdiv(m, tile["TILE_M"]) * cdiv(n, tile["TILE_N"]),)
        _copied_tile_kernel[grid](a, w, *tensors, m, out.stride(0), n, **kind, **tile, **overlapped())
        return out
    tile = tiles(m, n, k, in_groups)
    splits, num_tiles, tall = tile["SPLIT"], cdiv(n, tile["TILE_N"]), cdiv(m, tile["TILE_M"])
    partial, counter = out, out
    if splits > 1:
        exact = torch.float32 if is_float or in_groups else torch.int32
        partial = torch.empty((splits, m, n), dtype=exact, device=out.device)
        counter = counters.on(out.device, num_tiles * tall)
    given = codes, weight, *tensors, partial, counter, m, out.stride(0), n
    _tile_kernel[(num_tiles, splits, tall)](*given, **kind, **tile, **overlapped())
    return out


@functools.cache
def _has_cublas() -> bool:
    """Return True if cuBLAS multiplies FP8 numbers with scales of tokens, outputs and blocks."""
    known = card()
    return known == CARDS["sm_90"] and int((torch.version.cuda or "0").partition(".")[0]) >= 13


def _cublas(
    codes: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the product. Sums of a block are added in float32; others keep 14 bits on the way."""
    if scales.dim() == 1:
        given = x_scales[:, None], scales[None, :], bias
        return torch._scaled_mm(codes, weight.t(), *given, out_dtype=dtype, use_fast_accum=True)
    m = len(codes)
    if rest := -m % 16:  # cuBLAS wants scales of whole 16 bytes; multiples of 16 rows were tried
        codes = functional.pad(codes.view(torch.uint8), (0, 0, 0, rest)).view(codes.dtype)
        x_scales = functional.pad(x_scales, (0, rest))
    kinds = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
    made: Tensor = functional.scaled_mm(
        codes, weight.t(), x_scales.t(), kinds[0], scales.t(), kinds[1], output_dtype=dtype
    )[:m]
    return made if bias is None else made + bias


@functools.cache
def tiles(num_rows: int, n: int, k: int, in_groups: bool) -> dict[str, Any]:
    """Choose tile and split of few rows, as measured on an H100."""
    tile_m, tile_n = min(128, max(16, power_of_2(num_rows))), 64
    num_tiles = cdiv(n, tile_n) * cdiv(num_rows, tile_m)
    is_long = not in_groups and tile_m <= 64 and k % 256 == 0
    tile_k = 256 if is_long else GROUP
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "SPLIT": splits_of_inputs(cdiv(num_tiles, 2) if in_groups else num_tiles, k),
        "num_warps": 4,
        "num_stages": stages(4, (tile_m + tile_n) * tile_k),
    }


@functools.cache
def copied_tiles(num_rows: int, n: int, in_groups: bool) -> dict[str, Any]:
    """Choose the tile of many rows, as measured on an H100."""
    wide = not in_groups and cdiv(num_rows, 128) * cdiv(n, 256) >= WAVE and fits(4, 3 * 128 * GROUP)
    return {
        "TILE_M": 128,
        "TILE_N": 256 if wide else 128,
        "TILE_K": GROUP,
        "num_warps": 8,
        "num_stages": stages(4, 2 * 128 * GROUP),
    }
