"""MXFP4 as gpt-oss has it: experts in blocks of 32 E2M1 numbers under a power of two, all else plain."""

import torch
from torch import Tensor

from octavo.config.engine import EngineConfig
from octavo.runtime.quantization.compressed_tensors import MXFP4Form
from octavo.runtime.quantization.method import ExpertsMethod, LinearMethod, Scheme, Sources, Storage
from octavo.runtime.quantization.packed_experts import PackedExperts
from octavo.runtime.quantization.stored_config import stored_quantization
from octavo.runtime.quantization.unquantized import Unquantized

_FORM = MXFP4Form("blocks", "scales")


def join_blocks(packed: Tensor, exponents: Tensor) -> Tensor:
    """Return the bytes of GGUF's blocks, of [..., K / 2], whose first numbers are low, and [..., K / 32]."""
    codes = torch.stack([packed & 15, packed >> 4], -1).view(*exponents.shape, 2, 16)
    return torch.cat([exponents[..., None], codes[..., 0, :] | codes[..., 1, :] << 4], -1).flatten(-2)


class MXFP4(Scheme):
    """Multiplies experts by their codes."""

    def __init__(self, storage: Storage, config: EngineConfig, sources: Sources) -> None:
        super().__init__(storage, config, sources)
        self._plain = Unquantized(storage, config, sources)

    @classmethod
    def matches(cls, config: EngineConfig) -> bool:
        return stored_quantization(config).get("quant_method") == "mxfp4"

    def linear(self, name: str) -> LinearMethod:
        return self._plain.linear(name)

    def experts(self, name: str) -> ExpertsMethod:
        return PackedExperts(self.storage, name, lambda projection, shard: _FORM)
