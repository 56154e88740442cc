"""Writes a GGUF file of a folder of safetensors or of another GGUF file, matrices rounded by a recipe.

Recipes mix block types as llama.cpp's llama_tensor_get_type does: more bits for the head, and for values and
the last matrix of the feed-forward block in the layers where they pay.
"""

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.base.errors import Unsupported
from octavo.base.gguf import BLOCK_TYPES, TensorInfo, open_gguf
from octavo.base.gguf_writer import Entry, write_gguf
from octavo.config.engine import EngineConfig
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.blocks import block_dequantize
from octavo.runtime.loader.gguf_folder import STAYS, Source, of_folder
from octavo.runtime.quantization.k_quants import quantize

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
_FEW_EXPERTS = 8
"""Beside so many experts attention is small, and has more bits."""


def write_quantized(
    config: EngineConfig, out: Path, recipe: str, vocabulary: dict[str, Any]
) -> dict[str, int]:
    """Write `out`; returns how many matrices have each type.

    vocabulary: the tokenizer's metadata, of a folder. Raises Unsupported, BadCheckpoint.
    """
    if recipe not in RECIPES:
        raise Unsupported(f"GGUF recipe {recipe!r} is unknown. Use one of {', '.join(RECIPES)}.")
    metadata, sources = _of_file(config) if config.checkpoint.format == "gguf" else of_folder(config)
    metadata |= vocabulary | {"general.file_type": RECIPES[recipe], "general.quantization_version": 2}
    shapes = {source.name: source.shape for source in sources}
    table = [
        Entry(name, shape, kept or _type_of(name, shape, recipe, shapes)) for name, shape, _, kept in sources
    ]
    contents = (_content(source.read(), entry) for source, entry in zip(sources, table, strict=True))
    write_gguf(out, metadata, table, contents)
    return dict(Counter(entry.type_name for entry in table if len(entry.shape) > 1))


def _content(tensor: Tensor, entry: Entry) -> bytes:
    if tensor.dtype == torch.uint8:  # blocks of the type that they keep
        return tensor.contiguous().numpy().tobytes()
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
            kind = "Q6_K" if _takes_more(int(name.split(".")[1]), layers) else kind
    if kind not in ("F16", "BF16") and any("_exps." in n and s[0] == _FEW_EXPERTS for n, s in shapes.items()):
        kind = "Q8_0" if re.search(r"attn_[kv]\.", name) else kind
        kind = "Q5_K" if "attn_output." in name and kind == "Q4_K" else kind
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
        if info.type.name == STAYS:
            return raw
        return block_dequantize(Packed(raw, info.type.name)).view(info.shape)

    metadata = {key: value for key, value in file.metadata.items() if key != "general.alignment"}
    return metadata, [
        Source(info.name, info.shape, partial(read, info), STAYS if info.type.name == STAYS else "")
        for info in file.tensors.values()
    ]
