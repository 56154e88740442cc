"""Random weights serve measurements: uniform in ±0.001, made on the device, the same however many ranks."""

from collections.abc import Iterator
from zlib import crc32

import torch
from torch import Tensor

from octavo.base.devices import torch_name
from octavo.config.engine import EngineConfig
from octavo.runtime.layers.build import named_parameters
from octavo.runtime.loader.piece import Piece
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.interface import Family

_BOUND = 1e-3


def read(config: EngineConfig, model: Family, arch: Arch) -> Iterator[Piece]:
    """Yield whole tensors, each from a seed of its own: the option `seed` and its name."""
    for name, parameter in named_parameters(model).items():
        for shard in parameter.layout.shards:
            if shard.name not in parameter.missing:
                continue
            origin = f"dummy {name}:{shard.name}"
            shape = parameter.layout.full_shape((shard,))
            tensor = random_tensor(config.model.seed, origin, shape, torch_name(config.parallel.device))
            yield Piece(origin, name, shard.name, tensor)


def random_tensor(seed: int, name: str, shape: tuple[int, ...], device: str) -> Tensor:
    """Return the weight `name`, float32; the same in every process with that kind of device."""
    generator = torch.Generator(device).manual_seed(crc32(f"{seed} {name}".encode()))
    return torch.empty(shape, device=device).uniform_(-_BOUND, _BOUND, generator=generator)
