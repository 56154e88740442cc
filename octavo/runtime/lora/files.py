"""Reads the tensors of an adapter's files, by module and by what they are to it."""

from collections import defaultdict
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from octavo.base.errors import RequestError
from octavo.config.gguf_adapter import is_gguf, open_adapter
from octavo.config.lora import CONFIG, WEIGHTS, PeftConfig, read_peft
from octavo.messages.adapters import AdapterPart
from octavo.runtime.lora.sites import EMBEDDING

_PREFIX = "base_model.model."
_KINDS = {
    "lora_A.weight": "down",
    "lora_embedding_A": "down",
    "lora_B.weight": "up",
    "lora_embedding_B": "up",
    "lora_B.bias": "bias",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "modules_to_save.weight": "whole",
    "token_adapter.trainable_tokens_delta": "rows",
    "base_layer.weight": "",
}
"""By the end of a tensor's name; "" = a copy of the base's."""
_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def open_part(part: AdapterPart) -> tuple[PeftConfig, dict[str, dict[str, Tensor]]]:
    """Read the files that the digest names; others are refused. Returns tensors by module and kind."""
    path = Path(part.path).expanduser()
    if not is_gguf(path):
        config = read_peft(path)
        return config, _by_module(read_tensors(path, part.digest), config)
    if digest_of([path.read_bytes()]) != part.digest:
        raise RequestError(f"{path} has changed since the request came.", "lora_path")
    config, file = open_adapter(path)
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, info in file.tensors.items():
        stem, _, end = name.rpartition(".")
        raw = torch.from_numpy(file.data(name)).view(getattr(torch, _TYPES[info.type.name]))
        if not bool(raw.isfinite().all()):
            raise RequestError(f"tensor {name} holds values that are not finite numbers.", "lora_path")
        found[stem.removesuffix(".weight")][_KINDS[f"{end[:-1]}{end[-1].upper()}.weight"]] = raw.clone()
    return config, found


def read_tensors(folder: Path, digest: bytes) -> dict[str, Tensor]:
    """Read the weights of the files that have this digest. Raises RequestError."""
    try:
        files = [(folder / name).read_bytes() for name in (CONFIG, WEIGHTS)]
        if digest_of(files) != digest:
            raise RequestError(f"{folder} has changed since the request came.", "lora_path")
        return load(files[1])
    except (OSError, SafetensorError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{folder} cannot be read: {error}", "lora_path") from error


def digest_of(files: list[bytes]) -> bytes:
    """Return the digest of an adapter's files, config first, as the front-end makes it."""
    return sha256(b"".join(sha256(content).digest() for content in files)).digest()


def _by_module(tensors: dict[str, Tensor], config: PeftConfig) -> dict[str, dict[str, Tensor]]:
    """Group tensors by module and kind. Raises RequestError for unknown names and for no finite values."""
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor.float()).all()):
            raise RequestError(f"tensor {name} holds values that are not finite numbers.", "lora_path")
        stem = name.removeprefix(_PREFIX)
        for end, kind in _KINDS.items():
            if stem.endswith(f".{end}"):
                if kind:
                    found[stem.removesuffix(f".{end}")][kind] = tensor
                break
        else:
            module, _, last = stem.replace(".base_layer.", ".").rpartition(".")
            is_saved = not {*module.split(".")}.isdisjoint(config.modules_to_save)
            if last == "bias" and (is_saved or config.trains_biases):
                found[module]["own_bias"] = tensor
                continue
            if last != "weight" or not (is_saved or module.rpartition(".")[2] in ("lm_head", EMBEDDING)):
                raise RequestError(f"tensor {name} is of no kind that is supported.", "lora_path")
            if is_saved:  # else PEFT saves embeddings beside adapters of embeddings
                found[module]["whole"] = tensor
    if config.trained_tokens and not any("rows" in kinds for kinds in found.values()):
        raise RequestError("trainable_token_indices, but there is no trainable_tokens_delta.", "lora_path")
    return found
