"""Writes a GGUF file of a folder of safetensors or of another GGUF file, matrices rounded by a recipe.

Recipes mix block types as llama.cpp's llama_tensor_get_type does: more bits for the head, and for values and
the last matrix of the feed-forward block in the layers where they pay.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.base.gguf import BLOCK_TYPES, TensorInfo, open_gguf
from octavo.base.gguf_writer import Entry, write_gguf
from octavo.config.engine import EngineConfig
from octavo.config.gguf_config import metadata_for_gguf
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.blocks import block_dequantize
from octavo.runtime.layers.rotary import LinearRope, Llama3Rope, Rope
from octavo.runtime.layers.self_attention import HeadsArch
from octavo.runtime.loader.safetensors import read_tensors
from octavo.runtime.models.arch import Arch, LayerArch
from octavo.runtime.models.interface import MODELS
from octavo.runtime.models.llama import unpair
from octavo.runtime.models.weights import Target
from octavo.runtime.quantization.k_quants import quantize
from octavo.runtime.quantization.stored_config import stored_quantization

RECIPES = {
    "Q8_0": 7,
    "Q4_0": 2,
    "Q6_K": 18,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K_S": 16,
    "Q5_K_M": 17,
    "F16": 1,
    "BF16": 32,
}
"""By name: the number that stands for it in a file (llama.h's llama_ftype)."""
_SMALLER = {"Q4_K": "Q5_0", "Q5_K": "Q8_0", "Q6_K": "Q8_0", "Q4_0": "F16", "Q5_0": "F16", "Q8_0": "F16"}
"""What takes the place of a type whose blocks the columns do not fill."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Source(NamedTuple):
    """A tensor that is yet to be read."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def write_quantized(
    config: EngineConfig, out: Path, recipe: str, vocabulary: dict[str, Any]
) -> dict[str, int]:
    """Write `out`; returns how many matrices have each type.

    vocabulary: the tokenizer's metadata, of a folder. Raises Unsupported, BadCheckpoint.
    """
    if recipe not in RECIPES:
        raise Unsupported(f"GGUF recipe {recipe!r} is unknown. Use one of {', '.join(RECIPES)}.")
    metadata, sources = _of_file(config) if config.checkpoint.format == "gguf" else _of_folder(config)
    metadata |= vocabulary | {"general.file_type": RECIPES[recipe], "general.quantization_version": 2}
    shapes = {source.name: source.shape for source in sources}
    table = [Entry(name, shape, _type_of(name, shape, recipe, shapes)) for name, shape in shapes.items()]
    contents = (_content(source.read(), entry) for source, entry in zip(sources, table, strict=True))
    write_gguf(out, metadata, table, contents)
    return dict(Counter(entry.type_name for entry in table if len(entry.shape) > 1))


def _content(tensor: Tensor, entry: Entry) -> bytes:
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(entry.type_name)
    if plain is None:
        return quantize(tensor, entry.type_name).data.numpy().tobytes()
    return tensor.to(plain).contiguous().view(torch.uint8).numpy().tobytes()


def _type_of(name: str, shape: tuple[int, ...], recipe: str, shapes: dict[str, tuple[int, ...]]) -> str:
    if len(shape) == 1 or not name.endswith(".weight") or name.endswith("ffn_gate_inp.weight"):
        return "F32"
    kind = recipe if recipe in {k.name for k in BLOCK_TYPES.values()} else recipe[:-2]
    if "_K" in recipe or recipe == "Q4_0":
        if name == "output.weight" or (name == "token_embd.weight" and "output.weight" not in shapes):
            kind = "Q6_K"
        elif recipe.endswith("_M") and re.search(r"attn_v\.|ffn_down[._]", name):
            layers = 1 + max(int(n) for other in shapes for n in re.findall(r"^blk\.(\d+)\.", other))
            kind = "Q6_K" if _takes_more(int(_NUMBER.findall(name)[0]), layers) else kind
    while shape[-1] % next(k.block for k in BLOCK_TYPES.values() if k.name == kind):
        kind = _SMALLER[kind]
    return kind


def _takes_more(layer: int, layers: int) -> bool:
    """Return True for the first and the last eighth of the layers, and for every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _of_file(config: EngineConfig) -> tuple[dict[str, Any], list[Source]]:
    file = open_gguf(Path(config.checkpoint.path))

    def read(info: TensorInfo) -> Tensor:
        raw = torch.from_numpy(file.data(info.name))
        return block_dequantize(Packed(raw, info.type.name)).view(info.shape)

    metadata = {key: value for key, value in file.metadata.items() if key != "general.alignment"}
    return metadata, [Source(info.name, info.shape, partial(read, info)) for info in file.tensors.values()]


def _of_folder(config: EngineConfig) -> tuple[dict[str, Any], list[Source]]:
    """Return metadata without the tokenizer's, and tensors as GGUF files have them."""
    if stored_quantization(config):
        raise Unsupported(f"{config.checkpoint.path} is quantized already: only plain weights are rounded.")
    checkpoint, family = config.checkpoint, MODELS.load(config.architecture)
    metadata = {"general.name": Path(checkpoint.path).name}
    metadata |= metadata_for_gguf(checkpoint.architecture, checkpoint.text_config)
    arch = family.arch_from_hf(checkpoint.text_config | {"max_model_len": config.model.max_model_len})
    stems = {target[:2]: (stem, target.transform) for stem, target in family.GGUF_WEIGHTS.rules.items()}
    ropes, sources = _ropes(metadata["general.architecture"], arch)
    for origin, name, tensor in read_tensors(Path(checkpoint.path)):
        if family.WEIGHTS.ignores(name):
            continue
        target = family.WEIGHTS.find(name)
        if target is None:
            raise BadCheckpoint(f"{origin} is not known to {checkpoint.architecture}")
        module, _, suffix = target.module.rpartition(".")
        if module == "lm_head" and arch.tied_head:
            continue
        stem, transform = stems.get((_NUMBER.sub("*", module), target.shard), ("", None))
        if not stem or transform not in (None, unpair):
            raise Unsupported(f"{origin}: octavo does not know its place in a GGUF file")
        numbers = _NUMBER.findall(module)

        def read(tensor: Tensor = tensor, target: Target = target, is_paired: bool = transform is unpair,
                 layer: LayerArch = arch.layers[int((numbers or ["0"])[0])]) -> Tensor:  # fmt: skip
            made = target.convert(tensor, arch)
            assert isinstance(made, Tensor)
            return _pair(made, layer) if is_paired else made

        sources.append(Source(f"{stem.replace('*', ''.join(numbers))}.{suffix}", tuple(tensor.shape), read))
    return metadata | ropes, sources


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
    if isinstance(rope, LinearRope):
        scaling = {f"{name}.rope.scaling.type": "linear", f"{name}.rope.scaling.factor": rope.factor}
        return made | scaling, []
    if not isinstance(rope, Llama3Rope) and type(rope) is not Rope:
        raise Unsupported(f"{type(rope).__name__} is not written to GGUF files: convert with llama.cpp.")
    divisors = Rope(dim=rope.dim, theta=rope.theta).frequencies()[0] / rope.frequencies()[0]
    needs = isinstance(rope, Llama3Rope)
    return made, [Source("rope_freqs.weight", tuple(divisors.shape), lambda: divisors)] * needs
