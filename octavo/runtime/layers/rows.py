"""`make_row_gather` says how models take some rows of their hidden states."""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.runtime.kernels.linear import Packed
from octavo.runtime.layers.build import BuildContext

RowGather = Callable[[Tensor, Tensor | None], Tensor]
"""Returns the rows [S] int64 of x [T, size]; all of them for None."""


def make_row_gather(build: BuildContext) -> RowGather:
    """Return torch's indexing; where calls of kernels are recorded, which know no torch, a kernel.

    That kernel is the embedding lookup: to it, float32 is a block of one number.
    """
    if build.kernels.steps.record_calls is None:
        return lambda x, rows: x if rows is None else x[rows]
    gather = build.kernels.linear.block_dequantize
    return lambda x, rows: x if rows is None else gather(Packed(x.view(torch.uint8), "F32"), rows)
