"""A snapshot: a folder with the weights as an engine has them in memory, and all else that a start needs.

Written by `octavo snapshot`, named like a model. It suits the options that decide how weights lie in memory,
this version of octavo, and the kind of machine that made it (the worker checks that); else it is refused.
Kernels in it are code: nobody but this user and root may have been able to write them.
"""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from octavo.base.errors import BadCheckpoint, ConfigError
from octavo.base.ownership import is_trusted
from octavo.config.args import EngineArgs
from octavo.config.checkpoint import SNAPSHOT, Checkpoint, read_json
from octavo.config.engine import EngineConfig
from octavo.version import __version__

_OTHER_FILES = (".json", ".jinja", ".txt", ".model")
_MODEL = ("dtype", "quantization", "quantization_config", "activations", "hf_overrides", "runner", "convert")
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel")


def options_of(config: EngineConfig) -> dict[str, Any]:
    """Return the options that decide how the weights lie in memory."""
    options = {name: getattr(config.model, name) for name in _MODEL}
    options |= {name: getattr(config.parallel, name) for name in _PARALLEL}
    return options | {"device": config.parallel.device_kind, "enable_lora": config.lora.enable_lora}


def write(config: EngineConfig, folder: Path, tokenizer: dict[str, Any], machine: str) -> None:
    """Write what a start reads besides weights. tokenizer: its special tokens and templates"""
    source = Path(config.checkpoint.path)
    for file in source.iterdir() if source.is_dir() else ():
        is_other = file.suffix in _OTHER_FILES and not file.name.endswith(".index.json")
        if is_other and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
    _write(folder / "config.json", config.checkpoint.config)
    _write(folder / "generation_config.json", config.checkpoint.generation_config)
    about = {
        "version": __version__,
        "format": config.checkpoint.format,
        "machine": machine,
        "options": options_of(config),
        "tokenizer": tokenizer,
        "sizes": {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()},
    }
    _write(folder / SNAPSHOT, about)


def with_options(args: EngineArgs, checkpoint: Checkpoint) -> EngineArgs:
    """Return the options as the snapshot was made with them, where they are left open. Raises ConfigError."""
    if not checkpoint.is_snapshot:
        return args
    folder = Path(checkpoint.path)
    about = read_json(folder / SNAPSHOT)
    _check(folder, about)
    defaults = {field.name: getattr(EngineArgs(), field.name) for field in fields(EngineArgs)}
    made_with: dict[str, Any] = about["options"]
    return replace(args, **{n: v for n, v in made_with.items() if getattr(args, n) == defaults[n]})


def check_options(config: EngineConfig) -> None:
    """Raise ConfigError for a snapshot that was made with other options."""
    if config.checkpoint.is_snapshot:
        made_with = read_json(Path(config.checkpoint.path) / SNAPSHOT)["options"]
        for name, value in options_of(config).items():
            if made_with.get(name) != value:
                raise ConfigError(
                    f"{config.checkpoint.path} is a snapshot of {name}={made_with.get(name)!r}, asked for is "
                    f"{value!r}: leave the option out, or make another snapshot."
                )


def check_machine(folder: Path, machine: str) -> None:
    """Raise ConfigError for a snapshot that was made on another kind of machine."""
    made_on = read_json(folder / SNAPSHOT).get("machine")
    if made_on != machine:
        raise ConfigError(f"{folder} is a snapshot for {made_on}, this is {machine}: make another one here.")


def _check(folder: Path, about: dict[str, Any]) -> None:
    advice = "make it again: octavo snapshot MODEL FOLDER"
    if about.get("version") != __version__:
        text = f"{folder} is a snapshot by octavo {about.get('version')}, this is {__version__}: {advice}."
        raise ConfigError(text)
    try:
        states = {path: path.lstat() for path in (folder.resolve(), *folder.iterdir())}
        sizes = {name: (folder / name).stat().st_size for name in about["sizes"]}
    except (OSError, KeyError, TypeError) as error:
        raise BadCheckpoint(f"{folder} is not a whole snapshot ({error}); {advice}.") from error
    if wrong := [path for path, state in states.items() if not is_trusted(state)]:
        raise ConfigError(
            f"{wrong[0]} belongs to somebody else or can be written by others: a snapshot holds kernels, "
            "which are code. Make it yours alone (chmod -R go-w), or make another one."
        )
    if changed := [name for name, size in about["sizes"].items() if sizes[name] != size]:
        raise BadCheckpoint(f"{folder}: {changed[0]} has been changed or cut off; {advice}.")


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
