"""What a row is drawn by, in one kernel instead of thirty: its random number and its request's limits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.ref import noise
from octavo.runtime.kernels.triton.launch import cdiv, overlapped, release, wait

_GAMMA, _MIX_1, _MIX_2 = (tl.constexpr(number) for number in (noise.GAMMA, noise.MIX_1, noise.MIX_2))
_ROWS = 64  # of one program


@triton.jit
def _shift_right(bits, COUNT: tl.constexpr):
    return (bits >> COUNT) & ((1 << (64 - COUNT)) - 1)


@triton.jit
def _mix(state):
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


# fmt: off
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows", "positions"])
def _limits_kernel(
    rows, positions, seeds, limits, out, num_rows,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = index < num_rows
    wait(PDL)
    release(PDL)
    row = tl.load(rows + index, mask=there, other=0)
    position = tl.load(positions + index, mask=there, other=0)
    bits = _mix(_mix(tl.load(seeds + row, mask=there, other=0) + _GAMMA) + (position + 1) * _GAMMA)
    chance = _shift_right(bits, 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    tl.store(out + index, chance, mask=there)
    for column in tl.static_range(COLUMNS):
        number = tl.load(limits + row * COLUMNS + column, mask=there, other=0.0)
        tl.store(out + (column + 1) * num_rows + index, number, mask=there)
# fmt: on


def row_limits(rows: Tensor, positions: Tensor, seeds: Tensor, limits: Tensor) -> Tensor:
    """See sampling.RowLimits."""
    num_rows, num_columns = len(rows), limits.shape[1]
    out = torch.empty((1 + num_columns, num_rows), dtype=torch.float64, device=rows.device)
    if num_rows:
        tensors = rows, positions, seeds, limits, out
        _limits_kernel[(cdiv(num_rows, _ROWS),)](
            *tensors, num_rows, COLUMNS=num_columns, ROWS=_ROWS, num_warps=2, **overlapped()
        )
    return out
