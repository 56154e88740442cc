"""Reads a GGUF file's tensors: matrices as packed blocks over the mapped file, vectors as plain tensors."""

from collections.abc import Iterator
from pathlib import Path

import torch

from octavo.base.errors import BadCheckpoint
from octavo.base.gguf import GGUFFile, open_gguf
from octavo.config.engine import EngineConfig
from octavo.runtime.loader.piece import Piece
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.interface import Family
from octavo.runtime.models.weights import Target
from octavo.runtime.quantization.blocks import Blocks
from octavo.runtime.quantization.parameter import Stored

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read(config: EngineConfig, model: Family, arch: Arch) -> Iterator[Piece]:
    """Yield every tensor of the file. Raises BadCheckpoint for one that the family does not know."""
    file = open_gguf(Path(config.checkpoint.path))
    for name, origin, target in targets(config, file, model):
        tensor = target.convert(_tensor(file, name, origin), arch)
        yield Piece(origin, target.module, target.shard, tensor)


def targets(config: EngineConfig, file: GGUFFile, model: Family) -> Iterator[tuple[str, str, Target]]:
    """Yield (name, origin for messages, target) of every tensor that is needed. Raises BadCheckpoint."""
    for name in file.tensors:
        if model.GGUF_WEIGHTS.ignores(name):
            continue
        origin, target = f"{file.path}: tensor {name!r}", model.GGUF_WEIGHTS.find(name)
        if target is None:
            raise BadCheckpoint(f"{origin} is not known to {config.checkpoint.architecture}")
        if not model.is_elsewhere(target.module):
            yield name, origin, target


def _tensor(file: GGUFFile, name: str, origin: str) -> Stored:
    info = file.tensors[name]
    raw = torch.from_numpy(file.data(name))
    if len(info.shape) in (2, 3):
        return Blocks(raw.view(*info.shape[:-1], -1), info.type)
    if len(info.shape) == 1 and info.type.name in PLAIN:
        return raw.flatten().clone().view(PLAIN[info.type.name])
    raise BadCheckpoint(f"{origin} of type {info.type.name} has {len(info.shape)} axes")
