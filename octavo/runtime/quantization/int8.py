"""`quantization="int8"` packs the numbers of an unquantized checkpoint to 8 bits as they are loaded.

Every 32 weights of a row become whole multiples of one float16 scale, 127 of which make the largest of them:
GGUF's Q8_0, finer than a scale per channel, and multiplied by the kernels of GGUF files. Rows that 32 does
not divide stay as they are.
"""

from functools import partial

import torch
from torch import Tensor

from octavo.config.engine import EngineConfig
from octavo.runtime.kernels.block_types import TYPES_BY_NAME
from octavo.runtime.quantization.blocks import Blocks, blocks_of_one
from octavo.runtime.quantization.experts import make_block_experts
from octavo.runtime.quantization.gguf import GGUFLinear
from octavo.runtime.quantization.method import ExpertsMethod, LinearMethod
from octavo.runtime.quantization.online import Online, PackingParameter
from octavo.runtime.quantization.unquantized import Unquantized

_Q8_0 = TYPES_BY_NAME["Q8_0"]
_LARGEST, _HALF = 127, torch.tensor(0.5)
_AT_ONCE = 1 << 13  # blocks: what is computed on the way stays in a processor's cache


class Int8(Online):
    """Packs matrices of safetensors files or dummies."""

    @classmethod
    def matches(cls, config: EngineConfig) -> bool:
        return bool(config.model.quantization) and Unquantized.matches(config)

    def linear(self, name: str) -> LinearMethod:
        return GGUFLinear(self.storage, partial(PackingParameter, pack))

    def experts(self, name: str) -> ExpertsMethod:
        """Return a method over blocks; on a GPU they are unpacked."""
        return make_block_experts(self.storage, partial(PackingParameter, pack))


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
