"""What a model on disk says of itself: one description for safetensors folders and GGUF files, without torch.

`Checkpoint.config` is a dict in the form of Hugging Face's config.json, whatever the format; the runtime's
`models/arch.py` is the only place that interprets it per architecture.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.base.gguf import GGUFFile, open_gguf
from octavo.config.gguf_config import config_from_gguf, generation_from_gguf
from octavo.config.mmproj_config import find_mmproj, models_in, with_encoder
from octavo.config.nested_text import fill_text

Format = Literal["safetensors", "gguf", "none"]
_COUNTS_FROM_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet")
_LENGTHS = (
    "max_target_positions",
    "max_trained_positions",
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
)
SNAPSHOT = "snapshot.json"
"""In a folder that is a snapshot (config/snapshot)."""
GPU_KERNELS = "triton"
"""The folder of a snapshot for what Triton has compiled."""
_MAX_DIGITS = 18
"""Of integers in JSON, the sign counted: so they fit into messages."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where the weights are, what architecture they have and how the model likes to be sampled."""

    path: str
    format: Format
    """"none": a folder with a config only, for dummy weights."""
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    mmproj: str = ""
    """The file of a GGUF model's encoder."""
    weight_version: str = ""
    """What the weights are called; empty for those of the start."""

    @property
    def is_snapshot(self) -> bool:
        """True for weights as they lie in an engine's memory."""
        return (Path(self.path) / SNAPSHOT).is_file()

    @property
    def architecture(self) -> str:
        """The first entry of `architectures`, e.g. LlamaForCausalLM."""
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else "unknown"

    @property
    def media_architecture(self) -> str:
        """The same, of a model for images: Pixtral's files call themselves LLaVA."""
        vision = self.config.get("vision_config")
        is_pixtral = isinstance(vision, dict) and vision.get("model_type") == "pixtral"
        is_llava = self.architecture == "LlavaForConditionalGeneration"
        return "PixtralForConditionalGeneration" if is_pixtral and is_llava else self.architecture

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the config that describes the language model."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        size = self.text_config.get("vocab_size")
        if not isinstance(size, int) or size < 1:
            raise BadCheckpoint(f"{self.path}: the config's vocab_size is {size!r}")
        return size

    @property
    def embedding_size(self) -> int:
        """Width of a token's embedding."""
        for key in ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model", "dim"):
            if isinstance(size := self.text_config.get(key), int) and size > 0:
                return size
        raise BadCheckpoint(f"{self.path}: the config does not say its hidden_size")

    @property
    def max_position_embeddings(self) -> int:
        """The longest context the model was made for."""
        for key in _LENGTHS:
            if isinstance(length := self.text_config.get(key), int) and length > 0:
                return max(1, length - self.position_offset)
        return 2048

    @property
    def max_source_tokens(self) -> int:
        """The longest that an encoder-decoder's encoder reads."""
        for key in ("max_source_positions", "max_position_embeddings", "n_positions"):
            if isinstance(length := self.text_config.get(key), int) and length > 0:
                return length
        return 512

    @property
    def position_offset(self) -> int:
        """Number of the first token's position: some families count from behind the padding token's."""
        if self.text_config.get("model_type") not in _COUNTS_FROM_PADDING:
            return 0
        return offset_from_padding(self.text_config)


def offset_from_padding(config: dict[str, Any]) -> int:
    """Number of the first token's position in families that count from behind the padding token's."""
    padding = config.get("pad_token_id", 1)
    return padding + 1 if isinstance(padding, int) and padding >= 0 else 2


def read_checkpoint(path: Path, overrides: dict[str, Any] | None = None, mmproj: str = "") -> Checkpoint:
    """Describe the model at `path`: a GGUF file, or a folder with config.json or with one GGUF file.

    mmproj: as in find_mmproj. Raises BadCheckpoint for a damaged or refused one.
    """
    if path.is_file():
        return _read_gguf(path, overrides or {}, mmproj)
    if (path / "config.json").is_file():
        return _read_folder(path, overrides or {})
    ggufs = models_in(path)
    if len(ggufs) == 1:
        return _read_gguf(ggufs[0], overrides or {}, mmproj)
    if ggufs:
        raise BadCheckpoint(
            f"{path} holds {len(ggufs)} GGUF files; name one: {', '.join(g.name for g in ggufs)}"
        )
    raise BadCheckpoint(f"{path} holds neither config.json nor a GGUF file")


def _read_gguf(path: Path, overrides: dict[str, Any], mmproj: str) -> Checkpoint:
    file = open_gguf(path)
    config, generation = config_from_gguf(file), generation_from_gguf(file)
    if encoder := find_mmproj(path, mmproj):
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        config = with_encoder(config, tokens if isinstance(tokens, list) else [], GGUFFile(encoder))
    return Checkpoint(
        path=str(path),
        format="gguf",
        config=config | overrides,
        generation_config=generation,
        mmproj=str(encoder or ""),
    )


def _read_folder(path: Path, overrides: dict[str, Any]) -> Checkpoint:
    config = fill_text(read_json(path / "config.json", _integer) | overrides)
    generation = read_generation_config(path) or {}
    kind: Format = "none"
    if (path / SNAPSHOT).is_file():
        kind = read_json(path / SNAPSHOT).get("format", kind)
    elif any(path.glob("*.safetensors")):
        kind = "safetensors"
    elif refused := [f.name for f in path.iterdir() if f.suffix in {".bin", ".pt", ".pth", ".ckpt"}]:
        raise Unsupported(
            f"{path} holds {refused[0]}: pickled weights can run code and are never loaded. "
            "Convert them to safetensors first."
        )
    return Checkpoint(path=str(path), format=kind, config=config, generation_config=generation)


def read_generation_config(folder: Path) -> dict[str, Any] | None:
    """How the folder's author would sample, if a file there says so. Raises BadCheckpoint."""
    path = folder / "generation_config.json"
    return read_json(path, _integer) if path.is_file() else None


def read_json(path: Path, integer: Callable[[str], int] = int) -> dict[str, Any]:
    """Read a file of a model folder that holds a JSON object. Raises BadCheckpoint."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_int=integer)
    except (OSError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{path} must hold a JSON object, found {type(content).__name__}")
    return content


def _integer(digits: str) -> int:
    """Return a number that a message can carry."""
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"the number {digits[:_MAX_DIGITS]}… is too large")
    return int(digits)
