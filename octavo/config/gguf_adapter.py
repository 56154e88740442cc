"""LoRA adapters as llama.cpp keeps them: one GGUF file, read by `read_gguf_adapter`.

Source of names and of the scale: convert_lora_to_gguf.py and llama-adapter.cpp of
https://github.com/ggml-org/llama.cpp.
"""

from pathlib import Path

from octavo.base.errors import BadCheckpoint, RequestError
from octavo.base.gguf import GGUFFile
from octavo.config.lora import CONFIG, WEIGHTS, PeftConfig

SUFFIX, DOWN, UP = ".gguf", ".lora_a", ".lora_b"
_PLAIN = ("F32", "F16", "BF16")


def is_gguf(path: Path) -> bool:
    """Return True if a path names a file of llama.cpp's, not a folder of PEFT's."""
    return path.suffix == SUFFIX


def files_of(path: Path) -> list[Path]:
    """Return the files that make up an adapter, or a learned prompt."""
    return [path] if is_gguf(path) else [path / CONFIG, path / WEIGHTS]


def open_adapter(path: Path) -> tuple[PeftConfig, GGUFFile]:
    """Read an adapter's head. Raises RequestError for what is missing, wrong or not supported."""
    try:
        file = GGUFFile(path)
    except (OSError, BadCheckpoint) as error:
        raise RequestError(f"No adapter found for {path}: {error}", "lora_path") from error
    kind, adapter = (file.metadata.get(key) for key in ("general.type", "adapter.type"))
    if (kind, adapter) != ("adapter", "lora"):
        text = f"general.type {kind!r} and adapter.type {adapter!r}; an adapter has 'adapter' and 'lora'."
        raise RequestError(f"{path}: {text}", "lora_path")
    alpha = file.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, float) or not 0 < alpha < 1e6:
        raise RequestError(f"{path}: adapter.lora.alpha must be above 0, found {alpha!r}.", "lora_path")
    rank = 0
    for name, tensor in file.tensors.items():
        if not name.endswith((DOWN, UP)) or len(tensor.shape) != 2 or tensor.type.name not in _PLAIN:
            text = f"tensor {name!r} of type {tensor.type.name} is no matrix of {', '.join(_PLAIN)} for LoRA."
            raise RequestError(f"{path}: {text}", "lora_path")
        rank = max(rank, tensor.shape[0] if name.endswith(DOWN) else 0)
    if not rank:
        raise RequestError(f"{path}: there is no lora_a.", "lora_path")
    invocation = file.metadata.get("adapter.alora.invocation_tokens") or ()
    return PeftConfig(rank, alpha, {}, {}, invocation=tuple(map(int, invocation))), file
