"""Writes a folder of safetensors whose linear layers are rounded, in the formats of compressed-tensors.

W4A16: symmetric 4-bit numbers in words, a scale per 128 inputs. fp8: E4M3 numbers, a scale per output, inputs
rounded per token as they come. Formats: https://github.com/vllm-project/compressed-tensors.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.base.errors import Unsupported
from octavo.config.checkpoint import read_json
from octavo.config.engine import EngineConfig
from octavo.runtime.loader.safetensors import read_tensors
from octavo.runtime.quantization.stored_config import stored_quantization

TARGETS = ("compressed-tensors:W4A16", "fp8")
_GROUP = 128
_MOST_BYTES = 4 << 30  # of one file
_LAYER = re.compile(r"\b(layers|h|blocks)\.\d+\.")
_PLAIN = re.compile(r"(norm|\.gate|router|gate_inp|shared_expert_gate|conv1d)\.weight$")


def write_quantized(config: EngineConfig, out: Path, target: str) -> dict[str, int]:
    """Write the folder `out`; returns how many matrices are rounded, and how many are not.

    Raises Unsupported for what cannot be rounded, or is already.
    """
    source = Path(config.checkpoint.path)
    if config.checkpoint.format != "safetensors" or stored_quantization(config):
        raise Unsupported(f"{source}: only folders of plain safetensors are rounded to {target}.")
    if config.checkpoint.architecture.startswith("GPT2"):
        raise Unsupported("GPT-2's matrices are no linear layers to other readers: use gguf:Q8_0.")
    out.mkdir(parents=True)
    for file in source.iterdir():
        if (
            file.is_file()
            and file.suffix not in (".safetensors", ".bin", ".pt", ".gguf")
            and "index" not in file.name
        ):
            shutil.copy2(file, out / file.name)
    ignored, count = ["lm_head"], 0

    def rounded() -> Iterator[tuple[str, Tensor]]:
        nonlocal count
        for _, name, tensor in read_tensors(source):
            stem = name.removesuffix(".weight")
            if not is_linear(name, tensor):
                yield name, tensor
            elif target != "fp8" and tensor.shape[1] % _GROUP:
                ignored.append(stem)
                yield name, tensor
            else:
                count += 1
                made = to_fp8(tensor) if target == "fp8" else to_w4a16(tensor)
                yield from ((f"{stem}.{suffix}", part) for suffix, part in made.items())

    _write(out, rounded())
    config_file = out / "config.json"
    text = read_json(config_file) | {"quantization_config": _description(target, ignored)}
    config_file.write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
    return {target: count, "not rounded": len(ignored) - 1}


def is_linear(name: str, tensor: Tensor) -> bool:
    """Return True for the matrix of a linear layer in a decoder layer, unless it chooses experts."""
    in_layer = _LAYER.search(name) and name.endswith(".weight") and not _PLAIN.search(name)
    return bool(in_layer and tensor.dim() == 2 and tensor.is_floating_point())


def to_w4a16(matrix: Tensor) -> dict[str, Tensor]:
    """Round to 4 bits, the largest of 128 inputs being 7.5 steps; codes are stored + 8, 8 to a word."""
    n, k = matrix.shape
    parts = matrix.float().view(n, -1, _GROUP)
    scales = (parts.abs().amax(-1) / 7.5).clamp(min=1e-10).to(matrix.dtype)
    codes = (parts / scales.float()[..., None]).round().clamp(-8, 7).view(n, -1, 8).int() + 8
    packed = (codes << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    return {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor([n, k])}


def to_fp8(matrix: Tensor) -> dict[str, Tensor]:
    """Round to E4M3, the largest of each output being 448."""
    wide = matrix.float()
    scales = (wide.abs().amax(1, keepdim=True) / 448).clamp(min=1e-12).to(matrix.dtype)
    codes = (wide / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}


def _write(out: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    files: list[dict[str, Tensor]] = [{}]
    names: dict[str, str] = {}
    held = total = 0

    def save() -> None:
        path = out / f"model-{len(files):05d}.safetensors"
        save_file({name: t.contiguous() for name, t in files[-1].items()}, path, {"format": "pt"})
        names.update(dict.fromkeys(files[-1], path.name))

    for name, tensor in tensors:
        if held + tensor.nbytes > _MOST_BYTES and files[-1]:
            save()
            files[-1] = {}
            files.append({})
            held = 0
        files[-1][name] = tensor
        held, total = held + tensor.nbytes, total + tensor.nbytes
    save()
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _description(target: str, ignored: list[str]) -> dict[str, Any]:
    common = {"symmetric": True, "dynamic": False, "observer": "minmax"}
    inputs = None
    if target == "fp8":
        weights = common | {"num_bits": 8, "type": "float", "strategy": "channel"}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
        kind = "float-quantized"
    else:
        weights = common | {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP}
        kind = "pack-quantized"
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "quantization_status": "compressed",
    }
