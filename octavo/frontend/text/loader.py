"""Finds the tokenizer that belongs to a model.

Called where an engine is started (`octavo.llm`, `frontend/async_engine`). Importing this module costs the
tokenizers library and Jinja, not transformers: that is imported for folders without tokenizer.json only, and
never with trust_remote_code.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tokenizers

from octavo.base.errors import BadCheckpoint, OctavoError, Unsupported
from octavo.base.gguf import open_gguf
from octavo.base.hub import locate
from octavo.config.checkpoint import SNAPSHOT, read_json
from octavo.config.engine import EngineConfig
from octavo.config.mmproj_config import models_in
from octavo.frontend.text.gguf_vocab import set_ends, tokenizer_from_metadata
from octavo.frontend.text.tokenizer import SpecialTokens, Tokenizer

_MAX_TEMPLATE_BYTES = 4 * 1024 * 1024
tokenizers.Tokenizer(tokenizers.models.BPE())  # the first would wait while torch's library is being bound


def tokenizer_for(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer of an engine: the model's own or the one named; None with skip_tokenizer_init.

    Raises ConfigError when it cannot be found, BadCheckpoint when it cannot be read.
    """
    model = config.model
    if model.skip_tokenizer_init:
        return None
    path = Path(config.checkpoint.path)
    if config.checkpoint.is_snapshot and not model.tokenizer:
        return _from_snapshot(path)
    if model.tokenizer:
        path = locate(model.tokenizer, download_dir=model.download_dir)
    return load_tokenizer(path, config.checkpoint.config.get("added_tokens", ()))


def load_tokenizer(path: Path, added: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer of a GGUF file, or of a folder (tokenizer files, else one GGUF). Raises BadCheckpoint.

    added: special tokens that a GGUF file's vocabulary lacks
    """
    if path.is_file():
        return tokenizer_from_metadata(open_gguf(path).metadata, added)
    ggufs = models_in(path)
    if len(ggufs) == 1 and not (path / "tokenizer.json").is_file():
        return tokenizer_from_metadata(open_gguf(ggufs[0]).metadata)
    if not path.is_dir():
        raise BadCheckpoint(f"{path} is neither a GGUF file nor a folder")
    return tokenizer_from_folder(path)


def keep_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Write a tokenizer into a snapshot; return the rest of it, as plain data."""
    backend, special = tokenizer.parts()
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    return {**asdict(special), "ends": sorted(special.ends)}


def _from_snapshot(folder: Path) -> Tokenizer:
    special = read_json(folder / SNAPSHOT)["tokenizer"]
    return Tokenizer(_backend(folder), SpecialTokens(**{**special, "ends": frozenset(special["ends"])}))


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Build the tokenizer of `folder`. Raises BadCheckpoint when its files are damaged or missing."""
    config = _read_json(folder / "tokenizer_config.json")
    names = _read_json(folder / "special_tokens_map.json") | config
    backend = _backend(folder)
    try:
        return _assemble(folder, backend, config, names)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        if isinstance(error, OctavoError):
            raise
        text = f"{type(error).__name__}: {error}"
        raise BadCheckpoint(f"{folder / 'tokenizer_config.json'} cannot be used: {text:.200}") from error


def _assemble(
    folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any], names: dict[str, Any]
) -> Tokenizer:
    _add_missing(backend, config)
    special = SpecialTokens(
        bos=_role(backend, names, "bos_token"),
        eos=_role(backend, names, "eos_token"),
        pad=_role(backend, names, "pad_token"),
        unk=_role(backend, names, "unk_token"),
        chat_templates=_chat_templates(folder, config),
    )
    if "add_bos_token" in config or "add_eos_token" in config:
        bos = special.bos if config.get("add_bos_token") else None
        set_ends(backend, bos, special.eos if config.get("add_eos_token") else None)
    return Tokenizer(backend, special)


def _backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _convert(folder)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        raise BadCheckpoint(f"{file} is not a tokenizer: {error}") from error


def _convert(folder: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        cause = " ".join(str(error).split())
        raise BadCheckpoint(f"{folder} holds no tokenizer that can be read: {cause}") from error
    if not isinstance(backend := getattr(converted, "backend_tokenizer", None), tokenizers.Tokenizer):
        raise Unsupported(
            f"The tokenizer of {folder} ({type(converted).__name__}) has no tokenizer.json and cannot be "
            "converted to one; set `tokenizer` to a folder that has it."
        )
    return backend


def _add_missing(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows (added when a model was fine-tuned)."""
    entries = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        if backend.id_to_token(int(token_id)) is None:
            flags = {
                key: bool(entry.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "special")
            }
            normalized = bool(entry.get("normalized", False))
            backend.add_tokens([tokenizers.AddedToken(entry["content"], normalized=normalized, **flags)])


def _role(backend: tokenizers.Tokenizer, names: dict[str, Any], role: str) -> int | None:
    name = names.get(role)
    if isinstance(name, dict):
        name = name.get("content")
    return backend.token_to_id(name) if isinstance(name, str) else None


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """chat_template.jinja and additional_chat_templates/*.jinja, before what tokenizer_config.json says."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    templates = config.get("chat_template") or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    elif isinstance(templates, list):
        templates = {entry["name"]: entry["template"] for entry in templates}
    return templates | {name: _read_template(file) for name, file in files.items() if file.is_file()}


def _read_template(file: Path) -> str:
    if file.stat().st_size > _MAX_TEMPLATE_BYTES:
        raise BadCheckpoint(f"{file} is larger than {_MAX_TEMPLATE_BYTES} bytes")
    return file.read_text(encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
