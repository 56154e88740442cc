"""Products of few rows with a large matrix, bound by reading it: one kernel without, one with tensor cores.

A single row is multiplied by plain arithmetic: each program takes some rows of the matrix, whole. More rows
fill a tile of the tensor cores; where the matrix has too few rows to occupy the device, several programs
share each, and the last to be done adds their parts in fixed order, so that a result is reproducible; or
the norm does that comes next, which is sooner.
Gates of more rows, where that pays, are `persistent` programs'. Everything else, and what measurements gave
to it, is torch's.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.norms import PartialSums, ResidualUpdate
from octavo.runtime.kernels.triton.elementwise import activate
from octavo.runtime.kernels.triton.launch import (
    LEAST_INPUTS,
    WAVE,
    Counters,
    cdiv,
    has_gluon,
    has_matrix_units,
    is_last,
    overlapped,
    power_of_2,
    release,
    splits_of_inputs,
    stages,
    wait,
)

_SOME_ROWS = 64  # above, torch is as fast or faster
_QUARTERED_ROWS = 256  # of a small matrix
_HALVED_ROWS = 336  # of a large, tall one
_SMALL_OUTPUTS = 1024  # whose tiles leave the device half empty
_LARGE = 2**24  # weights
_GATED_WIDTH = 2048
_GATED_SIZE = 2**26  # weights from which a gate inside the product pays
_PERSISTENT_ROWS = {*range(89, 129), *range(241, 257)}  # of gates: torch has better tiles for those between
NARROW = {torch.bfloat16, torch.float16}


# fmt: off
@triton.jit
def _gemv_kernel(
    x, weight, bias, out, N,
    K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply TILE_N rows by a single row; GATED: rows 0 … N - 1 of the matrix gate the next N."""
    wait(PDL)
    multiply_row(x, weight, bias, out, N, tl.program_id(0), K, TILE_N, TILE_K, BIASED, GATED, PDL)


@triton.jit
def multiply_row(
    x, weight, bias, out, N, program,
    K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Do what one program of `_gemv_kernel` does, and release the next kernel."""
    n, column = program * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    weight += n.to(tl.int64)[:, None] * K
    total = tl.zeros([TILE_N, TILE_K], tl.float32)
    gate = total
    for start in tl.static_range(0, K, TILE_K):
        k = start + column
        inside = k < K
        there = (n < N)[:, None] & inside[None, :]
        row = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gate += tl.load(weight + k[None, :], mask=there, other=0.0).to(tl.float32) * row
            total += tl.load(weight + N * K + k[None, :], mask=there, other=0.0).to(tl.float32) * row
        else:
            total += tl.load(weight + k[None, :], mask=there, other=0.0).to(tl.float32) * row
    release(PDL)
    result, gates = tl.sum(total, 1), tl.sum(gate, 1)
    if BIASED:
        result += tl.load(bias + (N if GATED else 0) + n, mask=n < N, other=0.0).to(tl.float32)
    if GATED:
        if BIASED:
            gates += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        result *= gates * tl.sigmoid(gates)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["M"])
def _gemm_kernel(
    x, weight, bias, out, partial, counters, M, stride_x, N,
    K: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SPLIT: tl.constexpr,
    BIASED: tl.constexpr, JOINED: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):
    """Multiply TILE_N rows of the matrix, the left operand, by all M rows, over one of SPLIT parts of K.

    GATED: half of them are the gates of the others, as in `_gemv_kernel`.
    """
    m, n = tl.arange(0, TILE_M), tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    row = n
    if GATED:
        OUTPUTS: tl.constexpr = TILE_N // 2
        n = tl.program_id(0) * OUTPUTS + tl.arange(0, TILE_N) % OUTPUTS
        row = n + tl.arange(0, TILE_N) // OUTPUTS * N
    part_size: tl.constexpr = (K + SPLIT * TILE_K - 1) // (SPLIT * TILE_K) * TILE_K
    part = tl.program_id(1)
    column = part * part_size + tl.arange(0, TILE_K)
    rows, outputs = (m < M)[:, None], (n < N)[None, :]
    weight += row.to(tl.int64)[:, None] * K
    x += m[:, None] * stride_x
    total = tl.zeros([TILE_N, TILE_M], tl.float32)
    wait(PDL)
    release(PDL)
    for start in range(0, part_size, TILE_K):
        k = start + column
        inside = (k < K)[None, :]
        w = tl.load(weight + k[None, :], mask=(n < N)[:, None] & inside, other=0.0)
        a = tl.load(x + k[None, :], mask=rows & inside, other=0.0)
        total = tl.dot(w, tl.trans(a), total)
    total = tl.trans(total)
    place = m[:, None] * N + n[None, :]
    if SPLIT > 1:
        tl.store(partial + part * M * N + place, total, mask=rows & outputs)
        if not JOINED:
            return
        if not is_last(counters + tl.program_id(0), SPLIT):
            return
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        for index in tl.static_range(SPLIT):
            total += tl.load(
                partial + index * M * N + place, mask=rows & outputs, other=0.0, cache_modifier=".cg"
            )
    if BIASED:
        total += tl.load(bias + row, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gates, values = tl.split(tl.trans(tl.reshape(total, [TILE_M, 2, OUTPUTS]), [0, 2, 1]))
        total = values * gates * tl.sigmoid(gates)
        n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        place, outputs = m[:, None] * N + n[None, :], (n < N)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=rows & outputs)
# fmt: on


class Matmul:
    """The ops `matmul` and `gated_matmul`, and the counters that parts of a product meet at."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See linear.Matmul."""
        if not 0 < x.shape[0] <= _SOME_ROWS or x.dtype not in NARROW:
            return functional.linear(x, weight, bias)
        if x.shape[0] == 1:
            return _gemv(x, weight, bias)
        if not has_matrix_units():
            return functional.linear(x, weight, bias)
        return self._gemm(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See LinearKernels.gated_matmul. For other sizes one kernel was no faster than two."""
        num_rows, k = x.shape
        if num_rows == 1 and k <= _GATED_WIDTH and x.dtype in NARROW:
            return _gemv(x, weight, bias, gated=True)
        is_few = 1 < num_rows <= (16 if k <= _GATED_WIDTH else 32)
        if is_few and x.dtype in NARROW and has_matrix_units():
            return self._gemm(x, weight, bias, gated=True)
        is_large = weight.numel() >= _GATED_SIZE and bias is None
        if num_rows in _PERSISTENT_ROWS and is_large and x.dtype in NARROW and has_gluon():
            from octavo.runtime.kernels.triton.persistent import can_share, persistent_gates

            if can_share(x, len(weight) // 2):
                return persistent_gates(x, weight)
        return activate(self(x, weight, bias), "silu", gated=True)

    def split(self, x: Tensor, weight: Tensor) -> ResidualUpdate:
        """See linear.SplitMatmul.

        Parts that need not meet are done sooner: of few rows by a fifth, of more by 5 to 20 %.
        """
        (n, k), num_rows = weight.shape, x.shape[0]
        if 1 < num_rows <= _SOME_ROWS and x.dtype in NARROW and has_matrix_units():
            product = self._gemm(x, weight, None, joined=False)
            return PartialSums(product) if product.dim() > x.dim() else product
        num_splits = _num_splits(num_rows, n, k) if x.dtype in NARROW else 1
        if num_splits == 1:
            return self(x, weight)
        rows, outputs = x.view(-1, num_splits, k // num_splits), weight.view(n, num_splits, k // num_splits)
        product = torch.bmm(rows.transpose(0, 1), outputs.permute(1, 2, 0), out_dtype=torch.float32)
        return PartialSums(product)

    def _gemm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, joined: bool = True, gated: bool = False
    ) -> Tensor:
        """Return the product, [m, n]; unless `joined`, its parts if there are some, [parts, m, n] float32."""
        (m, k), num_outputs = x.shape, weight.shape[0]
        n = num_outputs // 2 if gated else num_outputs
        tile = _tile(m, num_outputs, k, gated)
        num_splits, num_tiles = tile["SPLIT"], cdiv(num_outputs, tile["TILE_N"])
        out = partial = x.new_empty((m, n))
        if num_splits > 1:
            partial = x.new_empty((num_splits, m, n), dtype=torch.float32)
        counter = self._counters.on(x.device, num_tiles) if num_splits > 1 and joined else out
        tensors = x, weight, out if bias is None else bias, out, partial, counter
        kind = {"K": k, "BIASED": bias is not None, "JOINED": joined, "GATED": gated}
        _gemm_kernel[(num_tiles, num_splits)](*tensors, m, x.stride(0), n, **kind, **tile, **overlapped())
        return out if joined else partial


def _gemv(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> Tensor:
    n, k = weight.shape[0] // (1 + gated), weight.shape[1]
    out = x.new_empty((1, n))
    tile_n = 4 if k <= 1024 and not gated else 2
    sizes = {"K": k, "TILE_N": tile_n, "TILE_K": min(1024, power_of_2(k))}
    kind = {"BIASED": bias is not None, "GATED": gated}
    tensors = x, weight, out if bias is None else bias, out
    _gemv_kernel[(cdiv(n, tile_n),)](*tensors, n, num_warps=4, **sizes, **kind, **overlapped())
    return out


def _num_splits(num_rows: int, n: int, k: int) -> int:
    """Return in how many parts more than some rows are multiplied sooner than as a whole, side by side.

    Four of a small matrix occupy the device; a large one is halved if it is tall.
    """
    if num_rows <= _SOME_ROWS:
        return 1
    if n * k < _LARGE:
        is_small = n <= _SMALL_OUTPUTS and k >= 4 * LEAST_INPUTS and k % 64 == 0
        return 4 if is_small and num_rows <= _QUARTERED_ROWS else 1
    return 2 if k >= 2 * n and k % 16 == 0 and num_rows <= _HALVED_ROWS else 1


@functools.cache
def _tile(num_rows: int, n: int, k: int, gated: bool) -> dict[str, Any]:
    """Choose tile and split, as measured on an H200: wave, parts and stages, more for lone programs.

    Gates meet the values they belong to before anything is stored, so a gated product is not split.
    """
    tile_m, tile_n, tile_k = max(16, power_of_2(num_rows)), 64, 128
    num_tiles = cdiv(n, tile_n)
    num_splits = 1
    if k > 2 * LEAST_INPUTS and not gated:
        num_splits = splits_of_inputs(num_tiles, k)
    num_stages = (6 if num_tiles * num_splits <= WAVE else 4) - (tile_m > 32)
    return {
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "SPLIT": num_splits,
        "num_warps": 4,
        "num_stages": stages(
            min(num_stages, max(2, k // (num_splits * tile_k))), 2 * (tile_m + tile_n) * tile_k
        ),
    }
