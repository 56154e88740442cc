"""Flags out of dataclass fields: a config class declares an option once, and this makes the flag of it.

A list may be given as several words, by several flags, or as JSON. A bool has `--x` and `--no-x`; whole
numbers may carry a unit (8k = 8000, 8K = 8KiB = 8192, 2GiB); mappings are JSON. Every default is None, so
that "not given" stays visible to the code that decides.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, get_args, get_origin

from octavo.base.foreign import Foreign
from octavo.cli.units import any_value, whole_number
from octavo.config.args import EngineArgs
from octavo.config.foreign import ALIASES, ENGINE, Alias
from octavo.config.secret import Secret

_SHORT = """attention_config=-ac compilation_config=-cc data_parallel_address=-dpa data_parallel_backend=-dpb
    data_parallel_external_lb=-dpe data_parallel_hybrid_lb=-dph data_parallel_multi_port_external_lb=-dpm
    data_parallel_rank=-dpn data_parallel_rpc_port=-dpp data_parallel_size=-dp data_parallel_size_local=-dpl
    data_parallel_start_rank=-dpr decode_context_parallel_size=-dcp diffusion_config=-dc
    enable_expert_parallel=-ep nnodes=-n node_rank=-r optimization_level=-O pipeline_parallel_size=-pp
    prefill_context_parallel_size=-pcp speculative_config=-sc tensor_parallel_size=-tp"""
_SHORT_FLAGS = dict(pair.split("=") for pair in _SHORT.split())


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field of EngineArgs, by concern, and `--config`."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with the names of flags as keys.")
    for concern in EngineArgs.__mro__[1:-1]:
        add_flags(parser.add_argument_group(concern.__name__, concern.__doc__), concern)
    add_foreign_flags(parser, {**ENGINE, **ALIASES})


def add_foreign_flags(parser: argparse.ArgumentParser, rows: Mapping[str, Foreign | Alias]) -> None:
    """Add a hidden flag for each option of other engines, so that a command line written for them is read.

    `config.compat` judges what was given.
    """
    for name, row in rows.items():
        behaviour: dict[str, Any] = {"type": any_value} | ({"nargs": "+"} if row.is_list else {})
        if row.is_switch:
            behaviour = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(
            *_flags(name, _SHORT_FLAGS), dest=name, default=None, help=argparse.SUPPRESS, **behaviour
        )


def add_flags(
    group: "argparse._ArgumentGroup",
    kind: Any,
    *,
    without: Container[str] = (),
    short: Mapping[str, str] = _SHORT_FLAGS,
) -> None:
    """Add one flag per field of the dataclass `kind`.

    without: fields that get none; short: short flags by field
    """
    for field in dataclasses.fields(kind):
        if field.name not in without:
            flags = _flags(field.name, short)
            group.add_argument(*flags, dest=field.name, default=None, **_behaviour(field))


def engine_args(args: argparse.Namespace) -> EngineArgs:
    """The engine's options among parsed arguments; those not given keep their defaults."""
    return EngineArgs.from_options(engine_options(args))


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those that were given, vLLM's among them."""
    return options(args, EngineArgs) | foreign_options(args, (*ALIASES, *ENGINE))


def foreign_options(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of other engines that were given, under their names."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def engine_flags_given(args: argparse.Namespace) -> list[str]:
    """The names of those options that were given, as flags."""
    return ["--" + name.replace("_", "-") for name in engine_options(args)]


def options(args: argparse.Namespace, kind: Any) -> dict[str, Any]:
    """What was given of the fields of the dataclass `kind`."""
    given = [(field, getattr(args, field.name)) for field in dataclasses.fields(kind)]
    return {
        field.name: _items(value, field.type) if isinstance(value, list) else value
        for field, value in given
        if value is not None
    }


def _flags(name: str, short: Mapping[str, str]) -> list[str]:
    return [*([short[name]] if name in short else []), "--" + name.replace("_", "-")]


def json_object(text: str) -> dict[str, Any]:
    """A JSON object on the command line."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object like {{"key": 1}}, got {text}')
    return value


_READERS: dict[type, Callable[[str], Any]] = {int: whole_number, float: float, str: str, dict: json_object}


def _items(words: list[str], kind: Any) -> list[Any]:
    """The entries of a list option; a word may be a JSON list of them."""
    make = Secret.of if get_args(kind) == (Secret,) else str
    lists = [(value if isinstance(value := any_value(word), list) else [word]) for word in words]
    return [
        make(json.dumps(item) if isinstance(item, dict) else str(item)) for items in lists for item in items
    ]


def _behaviour(field: dataclasses.Field[Any]) -> dict[str, Any]:
    default = field.default if field.default is not dataclasses.MISSING else ""
    explain = field.metadata["explain"].replace("%", "%%")
    shown = "" if default == "" else f" (default: {default})"
    if field.type is bool:
        return {"action": argparse.BooleanOptionalAction, "help": explain + shown}
    kind: Any = get_origin(field.type) or field.type
    if kind is list:
        return {"action": "extend", "nargs": "+", "metavar": "NAME", "help": explain}
    of_kind, words = _READERS[kind], field.metadata.get("words", {})
    read = (lambda text: words[text] if text in words else of_kind(text)) if words else of_kind
    behaviour: dict[str, Any] = {"type": read, "help": explain + shown}
    if field.metadata["choices"]:
        return behaviour | {"choices": field.metadata["choices"]}
    return behaviour | {"metavar": {int: "N", float: "X", str: "TEXT", dict: "JSON"}[kind]}
