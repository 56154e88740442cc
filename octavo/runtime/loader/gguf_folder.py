"""A folder's model as a GGUF file has it: metadata but the tokenizer's, tensors, those of experts as stacks.

Called by gguf_export. What octavo would not read back as the same architecture is refused.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.config.engine import EngineConfig
from octavo.config.gguf_config import config_from_metadata, metadata_for_gguf
from octavo.runtime.layers.experts import ExpertsArch
from octavo.runtime.layers.latent_attention import LatentArch
from octavo.runtime.layers.mlp import DenseArch
from octavo.runtime.layers.rotary import LinearRope, Llama3Rope, Rope, YarnRope
from octavo.runtime.layers.self_attention import HeadsArch
from octavo.runtime.loader.safetensors import read_tensors
from octavo.runtime.models.arch import Arch, LayerArch
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.gpt_oss import plain
from octavo.runtime.models.interface import MODELS, Family
from octavo.runtime.models.llama import unpair
from octavo.runtime.models.weights import Target, layer_of
from octavo.runtime.quantization.mxfp4 import join_blocks
from octavo.runtime.quantization.stored_config import stored_quantization

STAYS = "MXFP4"
"""Blocks that experts were trained in: no recipe rounds them again."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_EXPERT = re.compile(r"(\d+)(?:\.(\w+))?$")
_BLOCKS = "blocks", "scales"
_GATING = {"softmax": 1, "sigmoid": 2, "logits": 3}


class Source(NamedTuple):
    """A tensor that is yet to be read; kept: the type of its blocks, which are read as bytes."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    kept: str = ""


def of_folder(config: EngineConfig) -> tuple[dict[str, Any], list[Source]]:
    """Return metadata and tensors. Raises Unsupported, BadCheckpoint."""
    checkpoint, family = config.checkpoint, MODELS.load(config.architecture)
    if stored_quantization(config).get("quant_method", "mxfp4") != "mxfp4":
        raise Unsupported(f"{checkpoint.path} is quantized already: only plain weights are rounded.")
    metadata = {"general.name": Path(checkpoint.path).name}
    metadata |= metadata_for_gguf(checkpoint.architecture, checkpoint.text_config)
    own = {"max_model_len": config.model.max_model_len}
    arch, name = family.arch_from_hf(checkpoint.text_config | own), metadata["general.architecture"]
    ropes, sources = _ropes(name, arch)
    metadata |= ropes | {f"{name}.{key}": value for key, value in _sizes(arch).items()}
    sources += _sources(Path(checkpoint.path), family, arch)
    tensors = {source.name: source for source in sources}
    read = config_from_metadata(metadata, tensors.keys(), lambda tensor: tensors[tensor].read().tolist())
    again = MODELS.load(read["architectures"][0]).arch_from_hf(read | own)
    if differing := _differing(arch, again):
        raise Unsupported(
            f"GGUF files cannot say this of {checkpoint.architecture}: {differing}. Convert with llama.cpp."
        )
    return metadata, sources


def _differing(arch: Arch, again: Arch) -> str:
    """Return the first fields in which two models differ, ropes by what they do; empty if in none."""

    def parts(arch: Arch) -> list[dict[str, Any]]:
        alike = [vars(replace(arch, layers=arch.layers[:1])) | {"layers": len(arch.layers)}]
        for layer in arch.layers:
            frequencies, factor = layer.rope.frequencies() if layer.rope else (torch.empty(0), 1.0)
            turn = [*frequencies.tolist(), factor, layer.rope and layer.rope.interleaved]
            bodies = vars(layer.attention) | {f"mlp.{k}": v for k, v in vars(layer.feed_forward).items()}
            alike.append(bodies | {"sliding_window": layer.sliding_window, "rope": turn})
        return alike

    for ours, theirs in zip(parts(arch), parts(again), strict=False):
        if ours != theirs:
            return ", ".join(key for key in ours | theirs if ours.get(key) != theirs.get(key))
    return ""


def _sizes(arch: Arch) -> dict[str, Any]:
    """Return the metadata that configs have under several names, or leave out."""
    body, last = arch.layers[0].attention, arch.layers[-1].feed_forward
    made: dict[str, Any] = {"attention.layer_norm_rms_epsilon": float(arch.norm.eps)}
    if isinstance(body, LatentArch):
        made |= {"attention.key_length": body.plain_size + body.rope_size}
        made |= {"attention.value_length": body.value_size, "attention.head_count_kv": body.num_heads}
    elif isinstance(body, HeadsArch):
        made |= {f"attention.{kind}_length": body.head_dim for kind in ("key", "value")}
        made |= {"attention.head_count_kv": body.num_kv_heads}
    if window := max(layer.sliding_window for layer in arch.layers):
        made["attention.sliding_window"] = window
    if isinstance(last, ExpertsArch):
        router = last.router
        made |= {
            "leading_dense_block_count": sum(isinstance(x.feed_forward, DenseArch) for x in arch.layers),
            "expert_count": last.num_experts,
            "expert_feed_forward_length": last.intermediate_size,
            "expert_gating_func": _GATING[router.scores],
            "expert_weights_norm": router.normalises,
            "expert_weights_scale": float(router.factor),
            "expert_group_count": router.num_groups,
            "expert_group_used_count": router.top_groups,
        }
    return made


def _sources(folder: Path, family: type[Family], arch: Arch) -> list[Source]:
    """Return a folder's tensors by their names in GGUF files, parts of one joined."""
    rules = sorted(
        family.GGUF_WEIGHTS.rules.items(), key=lambda rule: Decoder.GGUF_WEIGHTS.rules.get(rule[0]) != rule[1]
    )
    stems = {target[:2]: (stem, target.transform) for stem, target in rules}  # those of its own count
    parts: dict[str, dict[str, Source]] = {}
    for origin, name, tensor in read_tensors(folder):
        index = layer_of(name) or 0
        if family.WEIGHTS.ignores(name) or (family.has_spare_layers and index >= len(arch.layers)):
            continue
        target = family.WEIGHTS.find(name)
        if target is None:
            raise BadCheckpoint(f"{origin} is not known to {family.__name__}")
        if target.module.startswith("lm_head.") and arch.tied_head:
            continue
        found = list(_places(stems, target, tensor, arch))
        if not found:
            raise Unsupported(f"{origin}: octavo does not know its place in a GGUF file")
        for part, source in found:
            parts.setdefault(source.name, {})[part] = source
    return [_joined(name, found, arch) for name, found in parts.items()]


def _places(
    stems: Mapping[tuple[str, str], tuple[str, Any]], target: Target, tensor: Tensor, arch: Arch
) -> Iterator[tuple[str, Source]]:
    """Yield (which part it is, whole or of an expert's; what it is a part of) of a tensor of the folder."""
    module, _, suffix = target.module.rpartition(".")
    layer = arch.layers[layer_of(target.module) or 0]
    expert, kind = found.groups(default="") if (found := _EXPERT.match(target.shard)) else ("", target.shard)
    shards = [kind]
    if ".experts." in module + "." and not target.shard and module.endswith((".up", ".experts")):
        shards = ["gate", "up"] if "down" not in suffix else [""]
    for i, shard in enumerate(shards):
        pattern = _NUMBER.sub("*", target.module)
        stem, transform = stems.get((pattern, shard)) or stems.get(
            (pattern.rpartition(".")[0], shard), ("", None)
        )
        if not stem or transform not in (None, unpair, plain):
            return
        if (
            stem.endswith("attn_q_b")
            and isinstance(layer.attention, LatentArch)
            and not layer.attention.query_rank
        ):
            stem = stem.removesuffix("_b")

        def read(tensor: Tensor = tensor, i: int = i, transform: Any = transform) -> Tensor:
            made = target.convert(tensor, arch)
            assert isinstance(made, Tensor)
            made = made.view(-1, 2, *made.shape[1:])[:, i] if len(shards) > 1 else made
            return _pair(made, layer) if transform is unpair else made

        name = stem.replace("*", "".join(_NUMBER.findall(module)))
        name = name if transform is plain else f"{name}.{'weight' if suffix in _BLOCKS else suffix}"
        shape = tensor.shape if target.transform is None else read(tensor.to("meta")).shape
        yield suffix if suffix in _BLOCKS else expert, Source(name, tuple(shape), read)


def _joined(name: str, parts: dict[str, Source], arch: Arch) -> Source:
    """Return a tensor of one part, of blocks and their scales, or of all experts. Raises BadCheckpoint."""
    if "" in parts:
        return parts[""]
    if parts.keys() >= set(_BLOCKS):
        blocks, scales = (parts[kind] for kind in _BLOCKS)
        shape = (*blocks.shape[:-1], 2 * blocks.shape[-1])
        return Source(name, shape, lambda: join_blocks(blocks.read(), scales.read()), STAYS)
    body = arch.layers[-1].feed_forward
    count = body.num_experts if isinstance(body, ExpertsArch) else 0
    if missing := {str(i) for i in range(count)} - parts.keys():
        raise BadCheckpoint(f"The checkpoint lacks parts of {name}: {', '.join(sorted(missing))}")
    inorder = [parts[str(i)] for i in range(count)]
    return Source(name, (count, *inorder[0].shape), lambda: torch.stack([part.read() for part in inorder]))


def _pair(tensor: Tensor, layer: LayerArch) -> Tensor:
    """Bring rows that rope rotates together beside each other: the reverse of `unpair`."""
    assert isinstance(layer.attention, HeadsArch)
    half = layer.attention.head_dim // 2
    return tensor.view(-1, 2, half, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _ropes(name: str, arch: Arch) -> tuple[dict[str, Any], list[Source]]:
    """Return the metadata of the rope, and its divisors as a tensor. Raises Unsupported."""
    ropes = [layer.rope for layer in sorted(arch.layers, key=lambda layer: layer.sliding_window > 0)]
    rope = ropes[0]
    assert rope is not None
    made: dict[str, Any] = {
        f"{name}.rope.freq_base": float(rope.theta),
        f"{name}.rope.dimension_count": rope.dim,
    }
    scaling = f"{name}.rope.scaling"
    if isinstance(rope, LinearRope):
        return made | {f"{scaling}.type": "linear", f"{scaling}.factor": rope.factor}, []
    if isinstance(rope, YarnRope):
        made |= {f"{scaling}.type": "yarn", f"{scaling}.factor": float(rope.factor)}
        made[f"{scaling}.original_context_length"] = rope.original_max_position_embeddings
        if rope.mscale_all_dim:
            made[f"{scaling}.yarn_log_multiplier"] = rope.mscale_all_dim / 10
        return made, []
    if not isinstance(rope, Llama3Rope) and type(rope) is not Rope:
        raise Unsupported(f"{type(rope).__name__} is not written to GGUF files: convert with llama.cpp.")
    divisors = Rope(dim=rope.dim, theta=rope.theta).frequencies()[0] / rope.frequencies()[0]
    needs = isinstance(rope, Llama3Rope)
    return made, [Source("rope_freqs.weight", tuple(divisors.shape), lambda: divisors)] * needs
