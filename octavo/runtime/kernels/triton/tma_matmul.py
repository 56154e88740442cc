"""Gated products whose tiles the copy engine of the device fetches (TMA), for more rows than `matmul` gates.

Called by `Matmul`. The matrix is the left operand of the tensor cores, x the right one. Loads of this kind
need no threads and no registers for addresses, which larger tiles lack; a few rows are left to plain loads.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.runtime.kernels.triton.launch import cdiv, overlapped, release, wait

_TILE = 64  # rows, outputs, and inputs of one load


# fmt: off
@triton.jit(do_not_specialize=["M"])
def _tma_kernel(
    x, weight, out, M, N,
    K: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):
    """TILE outputs of TILE rows; x and weight are descriptors. The matrix's first N rows gate the next N."""
    column, row = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    total = tl.zeros([TILE, TILE], tl.float32)
    gates = total
    wait(PDL)
    for start in range(0, K, TILE):
        rows = x.load([row, start]).T
        gates = tl.dot(weight.load([column, start]), rows, gates)
        total = tl.dot(weight.load([N + column, start]), rows, total)
    release(PDL)
    total *= gates * tl.sigmoid(gates)
    m, n = row + tl.arange(0, TILE), column + tl.arange(0, TILE)
    place = m[:, None] * N + n[None, :]
    tl.store(out + place, tl.trans(total.to(out.dtype.element_ty)), mask=(m < M)[:, None] & (n < N)[None, :])
# fmt: on


def tma_gated_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """See LinearKernels.gated_matmul. x: [M, K], contiguous, K a multiple of 8."""
    (m, k), n = x.shape, len(weight) // 2
    out = x.new_empty((m, n))
    _tma_kernel[(cdiv(n, _TILE), cdiv(m, _TILE))](
        TensorDescriptor.from_tensor(x, [_TILE, _TILE]),
        TensorDescriptor.from_tensor(weight, [_TILE, _TILE]),
        out,
        m,
        n,
        K=k,
        TILE=_TILE,
        num_warps=4,
        num_stages=3,
        **overlapped(),
    )
    return out
