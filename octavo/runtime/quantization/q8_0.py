"""Packs numbers to GGUF's Q8_0: every 32 of a row become whole multiples of one float16 scale."""

import torch
from torch import Tensor

from octavo.runtime.kernels.block_types import TYPES_BY_NAME
from octavo.runtime.quantization.blocks import Blocks, blocks_of_one

_Q8_0 = TYPES_BY_NAME["Q8_0"]
_LARGEST, _HALF = 127, torch.tensor(0.5)
_AT_ONCE = 1 << 13  # blocks: what is computed on the way stays in a processor's cache


def pack(matrix: Tensor) -> Blocks:
    """Return a float matrix [rows, columns], or some, in blocks of Q8_0; as it is if these do not fit."""
    *rows, columns = matrix.shape
    if columns % _Q8_0.block:
        return blocks_of_one(matrix.contiguous())
    blocks = matrix.reshape(-1, _Q8_0.block)
    packed = torch.empty((len(blocks), _Q8_0.num_bytes), dtype=torch.uint8, device=matrix.device)
    exact, spare = torch.empty((2, min(_AT_ONCE, len(blocks)), _Q8_0.block), device=matrix.device)
    for part, out in zip(torch.split(blocks, _AT_ONCE), torch.split(packed, _AT_ONCE), strict=True):
        _pack_into(out, exact[: len(part)].copy_(part), spare[: len(part)])
    return Blocks(packed.view(*rows, -1), _Q8_0)


def _pack_into(out: Tensor, exact: Tensor, spare: Tensor) -> None:
    """Pack into `out`. Halves are rounded away from zero, as by llama.cpp.

    out: [B, bytes per block]; exact, spare: [B, 32] float32, overwritten
    """
    scales = torch.abs(exact, out=spare).amax(1, keepdim=True).div_(_LARGEST)
    exact.mul_(torch.where(scales > 0, 1 / scales, 0))
    exact.add_(torch.copysign(_HALF, exact, out=spare))
    head = _Q8_0.num_bytes - _Q8_0.block
    out[:, :head] = scales.half().view(torch.uint8)
    out[:, head:].view(torch.int8).copy_(exact)
