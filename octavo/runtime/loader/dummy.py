"""Random weights for measurements: uniform in ±0.001, the same for every number of ranks."""

from collections.abc import Iterator
from zlib import crc32

import torch

from octavo.config.engine import EngineConfig
from octavo.runtime.layers.build import named_parameters
from octavo.runtime.loader.piece import Piece
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.interface import Model

_BOUND = 1e-3


def read(config: EngineConfig, model: Model, arch: Arch) -> Iterator[Piece]:
    """Yield whole tensors, each from a seed of its own: the option `seed` and its name."""
    del arch
    for name, parameter in named_parameters(model).items():
        for shard in parameter.layout.shards:
            origin = f"dummy {name}:{shard.name}"
            generator = torch.Generator().manual_seed(crc32(f"{config.model.seed} {origin}".encode()))
            shape = parameter.layout.full_shape((shard,))
            yield Piece(
                origin, name, shard.name, torch.empty(shape).uniform_(-_BOUND, _BOUND, generator=generator)
            )
