"""Products whose tiles the copy engine of the device fetches (TMA), for more rows than `matmul` takes itself.

Called by `Matmul`. The matrix is the left operand of the tensor cores, x the right one. Loads of this kind
need no threads and no registers for addresses, which larger tiles lack; a few rows are left to plain loads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.runtime.kernels.triton.launch import cdiv, overlapped, release, splits_of_inputs, wait

_TILE = 64  # rows, outputs, and inputs of one load


# fmt: off
@triton.jit(do_not_specialize=["M"])
def _tma_kernel(
    x, weight, out, M, N,
    K: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):
    """TILE outputs of TILE rows over one of SPLIT parts of K; x and weight are descriptors.

    GATED: rows 0 … N - 1 of the matrix are the gates of the next N.
    """
    column, part, row = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2) * TILE
    part_size: tl.constexpr = (K + SPLIT * TILE - 1) // (SPLIT * TILE) * TILE
    total = tl.zeros([TILE, TILE], tl.float32)
    gates = total
    wait(PDL)
    for start in range(part * part_size, part * part_size + part_size, TILE):
        rows = x.load([row, start]).T
        if GATED:
            gates = tl.dot(weight.load([column, start]), rows, gates)
            total = tl.dot(weight.load([N + column, start]), rows, total)
        else:
            total = tl.dot(weight.load([column, start]), rows, total)
    release(PDL)
    if GATED:
        total *= gates * tl.sigmoid(gates)
    m, n = row + tl.arange(0, TILE), column + tl.arange(0, TILE)
    place = part * M * N + m[:, None] * N + n[None, :]
    tl.store(out + place, tl.trans(total.to(out.dtype.element_ty)), mask=(m < M)[:, None] & (n < N)[None, :])
# fmt: on


def tma_gated_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """See LinearKernels.gated_matmul. x: [M, K], contiguous, K a multiple of 8."""
    return _launch(x, weight, x.new_empty((len(x), len(weight) // 2)), num_stages=3, gated=True)


def tma_split_k(x: Tensor, weight: Tensor) -> Tensor:
    """A product in as many parts as occupy the device: [parts, M, N] float32. x: as above."""
    (m, k), n = x.shape, len(weight)
    num_splits = splits_of_inputs(cdiv(n, _TILE) * cdiv(m, _TILE), k)
    return _launch(x, weight, x.new_empty((num_splits, m, n), dtype=torch.float32), num_stages=8)


def _launch(x: Tensor, weight: Tensor, out: Tensor, *, num_stages: int, gated: bool = False) -> Tensor:
    (m, k), n = x.shape, out.shape[-1]
    num_splits = out.numel() // (m * n)
    _tma_kernel[(cdiv(n, _TILE), num_splits, cdiv(m, _TILE))](
        TensorDescriptor.from_tensor(x, [_TILE, _TILE]),
        TensorDescriptor.from_tensor(weight, [_TILE, _TILE]),
        out,
        m,
        n,
        K=k,
        TILE=_TILE,
        SPLIT=num_splits,
        GATED=gated,
        num_warps=4,
        num_stages=num_stages,
        **overlapped(),
    )
    return out
