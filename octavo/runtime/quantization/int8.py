"""`quantization="int8"` packs the numbers of an unquantized checkpoint to 8 bits as they are loaded.

Every 32 weights of a row become whole multiples of one float16 scale, 127 of which make the largest of them:
GGUF's Q8_0, finer than a scale per channel, and multiplied by the kernels of GGUF files. Rows that 32 does
not divide stay as they are.
"""

from functools import partial

from torch import Tensor

from octavo.config.engine import EngineConfig
from octavo.runtime.quantization.blocks import Blocks
from octavo.runtime.quantization.experts import make_block_experts
from octavo.runtime.quantization.gguf import GGUFLinear
from octavo.runtime.quantization.method import ExpertsMethod, LinearMethod
from octavo.runtime.quantization.online import Online, PackingParameter
from octavo.runtime.quantization.q8_0 import pack
from octavo.runtime.quantization.unquantized import Unquantized


class Int8(Online):
    """Packs matrices of safetensors files or dummies."""

    @classmethod
    def matches(cls, config: EngineConfig) -> bool:
        return bool(config.model.quantization) and Unquantized.matches(config)

    def linear(self, name: str) -> LinearMethod:
        return GGUFLinear(self.storage, partial(PackingParameter, _pack))

    def experts(self, name: str) -> ExpertsMethod:
        """Return a method over blocks; on a GPU they are unpacked."""
        return make_block_experts(self.storage, partial(PackingParameter, _pack))


def _pack(shard: str, matrix: Tensor) -> Blocks:
    return pack(matrix)
