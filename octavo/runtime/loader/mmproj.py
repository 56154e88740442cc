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
_PART = ["ln1", "ln2", "attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down", "ffn_gate", "attn_qkv"]
_BLOCKS = [
    (stem, dict(zip(_PART, names.split(), strict=False)))
    for stem, names in (
        (
            "vision_tower.encoder.layers",
            "layer_norm1 layer_norm2 self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj "
            "mlp.fc1 mlp.fc2",
        ),
        (
            "vision_tower.encoder.layer",
            "layernorm_before layernorm_after attention.q_proj attention.k_proj attention.v_proj "
            "attention.projection_layer mlp.fc1 mlp.fc2",
        ),
        (
            "vision_tower.transformer.layers",
            "attention_norm ffn_norm attention.q_proj attention.k_proj attention.v_proj attention.o_proj "
            "feed_forward.up_proj feed_forward.down_proj feed_forward.gate_proj",
        ),
        ("visual.blocks", "norm1 norm2 attn.q attn.k attn.v attn.proj mlp.fc1 mlp.fc2"),
        (
            "visual.blocks",
            "norm1 norm2 attn.q attn.k attn.v attn.proj mlp.up_proj mlp.down_proj mlp.gate_proj",
        ),
        (
            "visual.blocks",
            "norm1 norm2 attn.q attn.k attn.v attn.proj mlp.linear_fc1 mlp.linear_fc2 - attn.qkv",
        ),
    )
]
"""Names in a block: of CLIP's and SigLIP's towers, InternVL's, Pixtral's, Qwen2-VL's, 2.5-VL's and 3-VL's."""
_DEEP = re.compile(r"^v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(weight|bias)$")
_AROUND = {
    "v.class_embd": ("vision_tower.embeddings.class_embedding", "vision_tower.embeddings.cls_token"),
    "v.patch_embd.weight": (
        "vision_tower.embeddings.patch_embedding.weight",
        "vision_tower.embeddings.patch_embeddings.projection.weight",
        "vision_tower.patch_conv.weight",
        "visual.patch_embed.proj.weight",
    ),
    "v.patch_embd.bias": (
        "vision_tower.embeddings.patch_embedding.bias",
        "vision_tower.embeddings.patch_embeddings.projection.bias",
        "visual.patch_embed.proj.bias",
    ),
    "v.position_embd.weight": (
        "vision_tower.embeddings.position_embedding.weight",
        "vision_tower.embeddings.position_embeddings",
        "visual.pos_embed.weight",
    ),
    "v.pre_ln.weight": ("vision_tower.pre_layrnorm.weight", "vision_tower.ln_pre.weight"),
    "v.pre_ln.bias": ("vision_tower.pre_layrnorm.bias",),
    **{
        f"{name}.{end}": tuple(f"{stem}.{end}" for stem in stems)
        for name, stems in {
            "v.post_ln": ("vision_tower.post_layernorm", "visual.merger.ln_q", "visual.merger.norm"),
            "mm.0": ("visual.merger.mlp.0", "visual.merger.linear_fc1"),
            "mm.2": ("visual.merger.mlp.2", "visual.merger.linear_fc2"),
        }.items()
        for end in ("weight", "bias")
    },
}
_SECOND = "v.patch_embd.weight.1"
"""What Qwen's tower makes of the second frame of a pair."""
_PROJECTORS = {
    "mm.1.weight": "multi_modal_projector.linear_1.weight",
    "mm.1.bias": "multi_modal_projector.linear_1.bias",
    "mm.input_norm.weight": "multi_modal_projector.norm.weight",
    "mm.patch_merger.weight": "multi_modal_projector.patch_merger.merging_layer.weight",
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
_PAIRED = re.compile(r"attn_[qk]\.")
"""Pixtral's rows of these have what rope turns together side by side, as a Llama's in GGUF."""


def read_mmproj(path: Path, model: Family, arch: Arch) -> Iterator[Piece]:
    """Yield every tensor that the encoder has. Raises BadCheckpoint for an unknown one."""
    file = GGUFFile(path)
    for name in file.tensors.keys() - {_SECOND, "v.token_embd.img_break"}:  # the text model has that, too
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
        if name == "v.patch_embd.weight" and _SECOND in file.tensors:
            tensor = torch.stack([tensor, _tensor(file, _SECOND, origin)], dim=2)
        yield Piece(origin, target.module, target.shard, target.convert(tensor, arch))


def _names(file: GGUFFile, name: str) -> list[str]:
    """Return what transformers calls a tensor, in one tower or another; nothing for an unknown one."""
    names = [*_AROUND.get(name, ())]
    if name in _PROJECTORS:
        names.append(_PROJECTORS[name])
    if found := _BLOCK.match(name):
        layer, part, end = found.groups()
        if part in ("ffn_up", "ffn_down") and _are_swapped(file, layer):
            part = "ffn_down" if part == "ffn_up" else "ffn_up"
        names += [f"{stem}.{layer}.{parts[part]}.{end}" for stem, parts in _BLOCKS if part in parts]
        if part in ("ls1", "ls2"):
            names.append(f"vision_tower.encoder.layer.{layer}.lambda_{part[2:]}")
    deep = file.metadata.get("clip.vision.is_deepstack_layers")
    if isinstance(deep, list) and (found := _DEEP.match(name)):  # numbered by layer
        layer, part, end = found.groups()
        number = sum(map(bool, deep[: int(layer)]))
        names.append(f"visual.deepstack_merger_list.{number}.{part.replace('fc', 'linear_fc')}.{end}")
    towers = [name for name in names if name.startswith("vision_tower.")]
    return [*names, *(name.replace("tower", "model", 1) for name in towers)]


def _are_swapped(file: GGUFFile, layer: str) -> bool:
    """Return True for the first files of LLaVA, where the layers of a block have each other's names."""
    up = file.tensors.get(f"v.blk.{layer}.ffn_up.weight")
    return up is not None and up.shape[0] == file.metadata.get("clip.vision.embedding_length")


def _tensor(file: GGUFFile, name: str, origin: str) -> Tensor:
    """Return plain numbers: encoders are not kept quantized."""
    info, raw = file.tensors[name], torch.from_numpy(file.data(name))
    if (dtype := PLAIN.get(info.type.name)) is not None:
        tensor = raw.flatten().clone().view(dtype).view(info.shape)
    elif len(info.shape) != 2:
        raise BadCheckpoint(f"{origin} of type {info.type.name} has {len(info.shape)} axes")
    else:
        tensor = block_dequantize(Packed(raw.view(info.shape[0], -1), info.type.name))
    if file.metadata.get("clip.projector_type") != "pixtral" or not _PAIRED.search(name):
        return tensor
    rows = tensor.view(file.metadata["clip.vision.attention.head_count"], -1, 2, *tensor.shape[1:])
    return rows.transpose(1, 2).reshape(tensor.shape)
