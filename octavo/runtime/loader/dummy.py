"""Random weights serve measurements: uniform in ±0.001, made on the device, the same however many ranks.

What packed checkpoints store is random bytes; scales in bytes, which are powers of two, are all alike. Others
are in bfloat16 and around 2^-10, as in checkpoints: float16 holds them.
"""

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
from octavo.runtime.quantization.forms import StoredParameter

_BOUND = 1e-3
_SCALE = 117  # 2^-10


def read(config: EngineConfig, model: Family, arch: Arch) -> Iterator[Piece]:
    """Yield whole tensors, each from a seed of its own: the option `seed` and its name."""
    device = torch_name(config.parallel.device)
    for name, parameter in named_parameters(model).items():
        if isinstance(parameter, StoredParameter):
            for part, outline in parameter.outlines():
                yield Piece(f"dummy {name}", name, part, _stored(name, outline))
            continue
        for shard in parameter.layout.shards:
            if shard.name not in parameter.missing:
                continue
            origin = f"dummy {name}:{shard.name}"
            shape = parameter.layout.full_shape((shard,))
            yield Piece(origin, name, shard.name, random_tensor(config.model.seed, origin, shape, device))


def _stored(name: str, outline: Tensor) -> Tensor:
    if outline.dtype.is_floating_point and outline.element_size() > 1:
        made = random_tensor(0, name, tuple(outline.shape), "cpu")
        if "scale" in name:
            made = (made.abs() + _BOUND).bfloat16()
        return made.to(outline.dtype)
    made = torch.empty(outline.shape, dtype=outline.dtype)
    made.view(torch.uint8).fill_(_SCALE) if "scale" in name else made.view(torch.uint8).random_(0, 256)
    return made


def random_tensor(seed: int, name: str, shape: tuple[int, ...], device: str) -> Tensor:
    """Return the weight `name`, float32; the same in every process with that kind of device."""
    generator = torch.Generator(device).manual_seed(crc32(f"{seed} {name}".encode()))
    return torch.empty(shape, device=device).uniform_(-_BOUND, _BOUND, generator=generator)
