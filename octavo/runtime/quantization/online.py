"""Plain checkpoints are rounded to fewer bits as they are loaded, by vLLM's shorthands and int4.

Every rank rounds its own part, to nearest. Embeddings and heads stay as they are, and so do matrices whose
columns a format's blocks do not divide.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.config.engine import EngineConfig
from octavo.runtime.quantization.blocks import Blocks, blocks_of_one
from octavo.runtime.quantization.gguf import GGUFLinear
from octavo.runtime.quantization.grouped import pack
from octavo.runtime.quantization.method import LinearMethod, Scheme
from octavo.runtime.quantization.parameter import BlockParameter, Layout, Shard
from octavo.runtime.quantization.roundings import ROUNDINGS, Round
from octavo.runtime.quantization.unquantized import Unquantized


class Online(Scheme):
    """Rounds the matrices of safetensors files or dummies."""

    @classmethod
    def matches(cls, config: EngineConfig) -> bool:
        return config.model.quantization in ROUNDINGS and Unquantized.matches(config)

    def linear(self, name: str) -> LinearMethod:
        if name.startswith(("embed_", "lm_head")):
            return Unquantized(self.storage, self.config, self.sources).linear(name)
        rounding = ROUNDINGS[self.config.model.quantization]
        return GGUFLinear(self.storage, partial(PackingParameter, partial(_rounded, rounding)))

    def router(self, name: str) -> LinearMethod:
        """Keep routers as they are: another choice of experts changes everything behind it."""
        return Unquantized(self.storage, self.config, self.sources).linear(name)


class PackingParameter(BlockParameter):
    """Packs what is loaded."""

    def __init__(self, pack: Callable[[Tensor], Blocks], layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device)
        self._pack = pack

    def _keep(self, shard: Shard, part: Tensor | Blocks) -> int:
        return super()._keep(shard, self._pack(part) if isinstance(part, Tensor) else part)


def _rounded(rounding: Round, matrix: Tensor) -> Blocks:
    if matrix.shape[1] % 64:
        return blocks_of_one(matrix.contiguous())
    blocks, places = pack(rounding(matrix.float()))
    assert places is None, "whole blocks need no other order"
    return blocks
