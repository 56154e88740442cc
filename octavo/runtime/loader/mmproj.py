"""Reads the encoder's tensors of an mmproj file, by the names that transformers has for them."""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.base.gguf import GGUFFile
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.blocks import block_dequantize
from octavo.runtime.loader.gguf import PLAIN
from octavo.runtime.loader.piece import Piece
from octavo.runtime.models.arch import Arch
from octavo.runtime.models.interface import Family

_BLOCK = re.compile(r"^v\.blk\.(\d+)\.(\w+)\.(weight|bias)$")
_IN_BLOCKS = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_AROUND = {
    "v.class_embd": "embeddings.class_embedding",
    "v.patch_embd.weight": "embeddings.patch_embedding.weight",
    "v.patch_embd.bias": "embeddings.patch_embedding.bias",
    "v.position_embd.weight": "embeddings.position_embedding.weight",
    "v.pre_ln.weight": "pre_layrnorm.weight",
    "v.pre_ln.bias": "pre_layrnorm.bias",
    "v.post_ln.weight": "post_layernorm.weight",
    "v.post_ln.bias": "post_layernorm.bias",
}
_INTERN = {
    "ln1": "layernorm_before",
    "ln2": "layernorm_after",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_out": "attention.projection_layer",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
"""Of InternVL's blocks."""
_INTERN_AROUND = {
    "v.class_embd": "embeddings.cls_token",
    "v.patch_embd.weight": "embeddings.patch_embeddings.projection.weight",
    "v.patch_embd.bias": "embeddings.patch_embeddings.projection.bias",
    "v.position_embd.weight": "embeddings.position_embeddings",
}
_PROJECTORS = {
    "mm.0.weight": "multi_modal_projector.linear_1.weight",
    "mm.0.bias": "multi_modal_projector.linear_1.bias",
    "mm.2.weight": "multi_modal_projector.linear_2.weight",
    "mm.2.bias": "multi_modal_projector.linear_2.bias",
    "mm.model.mlp.0.weight": "multi_modal_projector.layer_norm.weight",
    "mm.model.mlp.0.bias": "multi_modal_projector.layer_norm.bias",
    "mm.model.mlp.1.weight": "multi_modal_projector.linear_1.weight",
    "mm.model.mlp.1.bias": "multi_modal_projector.linear_1.bias",
    "mm.model.mlp.3.weight": "multi_modal_projector.linear_2.weight",
    "mm.model.mlp.3.bias": "multi_modal_projector.linear_2.bias",
    "model.image_newline": "image_newline",
    "mm.model.fc.weight": "connector.modality_projection.proj.weight",
    "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
    "mm.soft_emb_norm.weight": "multi_modal_projector.mm_soft_emb_norm.weight",
}
_TOWERS = ("vision_tower.", "vision_model.")


def read_mmproj(path: Path, model: Family, arch: Arch) -> Iterator[Piece]:
    """Yield every tensor that the encoder has. Raises BadCheckpoint for an unknown one."""
    file = GGUFFile(path)
    for name in file.tensors:
        origin = f"{path}: tensor {name!r}"
        names = _names(file, name)
        if not names:
            raise BadCheckpoint(f"{origin} is not known")
        if any(model.WEIGHTS.ignores(found) for found in names):
            continue
        target = next(filter(None, map(model.WEIGHTS.find, names)), None)
        if target is None:
            raise BadCheckpoint(f"{origin} is not known to the encoder")
        tensor = _tensor(file, name, origin)
        if name == "mm.soft_emb_norm.weight":  # files have what it multiplies by
            tensor = tensor - 1
        yield Piece(origin, target.module, target.shard, target.convert(tensor, arch))


def _names(file: GGUFFile, name: str) -> list[str]:
    """Return what transformers calls a tensor, in one tower or another; nothing for an unknown one."""
    if name in _PROJECTORS:
        return [_PROJECTORS[name]]
    inner, own = _AROUND.get(name), _INTERN_AROUND.get(name, "")
    if found := _BLOCK.match(name):
        layer, part, end = found.groups()
        if part in ("ffn_up", "ffn_down") and _are_swapped(file, layer):
            part = "ffn_down" if part == "ffn_up" else "ffn_up"
        own = f"encoder.layer.{layer}." + (f"lambda_{part[2:]}" if part in ("ls1", "ls2") else "")
        own += f"{_INTERN[part]}.{end}" if part in _INTERN else ""
        inner = f"encoder.layers.{layer}.{_IN_BLOCKS[part]}.{end}" if part in _IN_BLOCKS else None
    return [tower + known for tower in _TOWERS for known in (inner, own) if known]


def _are_swapped(file: GGUFFile, layer: str) -> bool:
    """Return True for the first files of LLaVA, where the layers of a block have each other's names."""
    up = file.tensors.get(f"v.blk.{layer}.ffn_up.weight")
    return up is not None and up.shape[0] == file.metadata.get("clip.vision.embedding_length")


def _tensor(file: GGUFFile, name: str, origin: str) -> Tensor:
    """Return plain numbers: encoders are not kept quantized."""
    info, raw = file.tensors[name], torch.from_numpy(file.data(name))
    if (dtype := PLAIN.get(info.type.name)) is not None:
        return raw.flatten().clone().view(dtype).view(info.shape)
    if len(info.shape) != 2:
        raise BadCheckpoint(f"{origin} of type {info.type.name} has {len(info.shape)} axes")
    return block_dequantize(Packed(raw.view(info.shape[0], -1), info.type.name))
