"""Reads a GGUF file's tensors: matrices as packed blocks over the mapped file, vectors as plain tensors."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.base.gguf import GGUFFile, open_gguf
from octavo.config.engine import EngineConfig
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.blocks import block_dequantize
from octavo.runtime.loader.piece import Piece
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.interface import Family
from octavo.runtime.models.weights import Target
from octavo.runtime.quantization.blocks import Blocks, blocks_of_one
from octavo.runtime.quantization.parameter import Stored

_KEYS, _VALUES = "attn_k_b.weight", "attn_v_b.weight"
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read(config: EngineConfig, model: Family, arch: Arch) -> Iterator[Piece]:
    """Yield every tensor of the file. Raises BadCheckpoint for one that the family does not know."""
    file = open_gguf(Path(config.checkpoint.path))
    for name, origin, target in targets(config, file, model):
        if name.endswith(_VALUES):
            if name.replace(_VALUES, _KEYS) not in file.tensors:
                raise BadCheckpoint(f"{origin} has no {name.replace(_VALUES, _KEYS)!r} beside it")
            continue
        stored = _latent_heads(file, name, origin) if name.endswith(_KEYS) else _tensor(file, name, origin)
        tensor = target.convert(stored, arch)
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


def _latent_heads(file: GGUFFile, name: str, origin: str) -> Blocks:
    """Return what makes keys and values of a latent, head by head, as attn_kv_b has it: of two tensors.

    Newer files have keys as [heads, latent, size], turned for the absorbed form, and values as they were.
    """
    other = name.replace(_KEYS, _VALUES)
    shapes = file.tensors[name].shape, file.tensors[other].shape if other in file.tensors else ()
    if list(map(len, shapes)) != [3, 3] or shapes[0][:2] != shapes[1][::2]:
        raise BadCheckpoint(f"{origin} of shape {shapes[0]} does not fit {other!r} of shape {shapes[1]}")
    keys, values = (_numbers(file, each) for each in (name, other))
    return blocks_of_one(torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1))


def _numbers(file: GGUFFile, name: str) -> Tensor:
    info = file.tensors[name]
    raw = torch.from_numpy(file.data(name)).view(prod(info.shape[:-1]), -1)
    return block_dequantize(Packed(raw, info.type.name)).view(info.shape).float()
