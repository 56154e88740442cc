"""What a checkpoint says of its own quantization, and which methods the option `quantization` may name."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.config.checkpoint import read_json
from octavo.config.engine import EngineConfig
from octavo.runtime.quantization.roundings import PACKERS

ALIASES = {
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "inc": "auto-round",
    "auto_round": "auto-round",
    "fbgemm_fp8": "fp8",
    "modelopt": "fp8",
    "modelopt_mxfp8": "fp8",
    "modelopt_fp4": "fp8",
    "modelopt_mixed": "fp8",
    "bnb": "bitsandbytes",
    "gpt_oss_mxfp4": "mxfp4",
}
"""Other names of schemes: vLLM's name a kernel beside the format; octavo chooses kernels itself."""

_REFUSED = {
    "humming": "octavo chooses its kernels itself: leave quantization out",
    "moe_wna16": "octavo chooses its kernels itself: leave quantization out",
    "experts_int8": "octavo packs dense layers, too: use int8",
    "deepseek_v4_fp8": "octavo has no DeepSeek-V4 yet: use DeepSeek-V3 in fp8",
    "fp_quant": "its weights are rotated, which octavo does not undo: use compressed-tensors or GPTQ",
}

_OF_PLAIN = ("unquantized", "online", *PACKERS)
"""Schemes of plain checkpoints, which say themselves what they do not fit."""


def stored_quantization(config: EngineConfig) -> dict[str, Any]:
    """Return the checkpoint's quantization_config with its quant_method; empty for a plain one.

    Raises BadCheckpoint for one that is no object, or for two that differ in their method.
    """
    found = dict(_blocks(config))
    methods = {where: _method_of(block) for where, block in found.items()}
    if len(set(methods.values())) > 1:
        said = " and ".join(f"{method!r} in {where}" for where, method in methods.items())
        raise BadCheckpoint(
            f"{config.checkpoint.path}: two quantization blocks disagree: {said}. Remove the wrong one."
        )
    if not found:
        return {}
    block = next(iter(found.values()))
    return block | {"quant_method": _method_of(block)}


def _blocks(config: EngineConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where it stands, block)."""
    entries = config.checkpoint.config, config.checkpoint.text_config
    for name in ("quantization_config", "compression_config"):
        block = entries[0].get(name) or entries[1].get(name)
        if block is None:
            continue
        if not isinstance(block, dict):
            raise BadCheckpoint(f"{config.checkpoint.path}: {name} must be an object, found {block!r:.80}")
        yield f"config.json's {name}", block
    path = Path(config.checkpoint.path) / "hf_quant_config.json"
    if path.is_file():
        block = read_json(path)
        yield path.name, {"quant_method": "modelopt"} | block.get("quantization", {})


def _method_of(block: dict[str, Any]) -> str:
    method = str(block.get("quant_method", "")).lower()
    if not method and ("load_in_4bit" in block or "load_in_8bit" in block):
        return "bitsandbytes"
    return method or ("compressed-tensors" if "config_groups" in block else "nothing known")


def check_name(name: str, stored: str | None, known: list[str]) -> None:
    """Raise Unsupported for a `quantization` that is not the checkpoint's, or that octavo has not."""
    if name in _REFUSED:
        raise Unsupported(f"quantization={name!r}: {_REFUSED[name]}.")
    meant = ALIASES.get(name, name)
    if meant not in known:
        raise Unsupported(f"Unknown quantization method: {name}. Must be one of {', '.join(sorted(known))}.")
    if stored and meant not in (ALIASES.get(stored, stored), *_OF_PLAIN):
        raise Unsupported(
            f"Quantization method specified in the model config ({stored}) does not match the quantization "
            f"method specified in the `quantization` argument ({name}). Leave it out."
        )


def whole_number(config: dict[str, Any], *names: str) -> int:
    """Return the first of these entries. Raises BadCheckpoint for none, or for what is no integer."""
    value = next((config[name] for name in names if name in config), None)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadCheckpoint(f"quantization_config: {names[0]} must be an integer, found {value!r}")
    return value


def is_excluded(module: str, names: list[str] | None) -> bool:
    """Return True if `names` has the module, a part of its dotted name, or a pattern that it matches."""
    return any(_matches(module, name) for name in names or ())


def _matches(module: str, name: str) -> bool:
    if name.startswith("re:"):
        return compiled(name[3:]).match(module) is not None
    return f".{name}." in f".{module}." or fnmatchcase(module, name)


def compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern of a quantization_config. Raises BadCheckpoint for one that is no regex."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise BadCheckpoint(f"quantization_config: {pattern!r} is no regex: {error}") from error


OF_INPUTS = frozenset(
    {"input_scale", "input_global_scale", "input_zero_point", "output_scale"}
    | {"k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale"}
)
"""Scales of inputs, queries, keys and values: these are rounded by scales of their own as they come, which
are finer: see scaled.py, and caches in int8."""
