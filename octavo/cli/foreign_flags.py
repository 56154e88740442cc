"""Flags for options of vLLM's that octavo has not, or has under another name: read here, judged by `compat`.

So a command line or YAML file written for vLLM runs, or is told what is refused and what would work. Help
does not show them.
"""

import argparse
from collections.abc import Iterable
from typing import Any

from octavo.base.foreign import ENGINE
from octavo.cli.units import any_value
from octavo.config.compat import ALIASES

_SHORT = {
    "attention_config": "-ac",
    "compilation_config": "-cc",
    "data_parallel_size": "-dp",
    "decode_context_parallel_size": "-dcp",
    "enable_expert_parallel": "-ep",
    "optimization_level": "-O",
    "pipeline_parallel_size": "-pp",
    "speculative_config": "-sc",
}
_SWITCHES = (
    "async_",
    "calculate_",
    "disable_",
    "enable_",
    "fully_",
    "return_",
    "trust_",
    "use_",
    "headless",
    "grpc",
)
"""How the names of options begin that take no value."""

ENGINE_NAMES = (*ALIASES, *ENGINE)


def add_foreign_flags(parser: argparse.ArgumentParser, names: Iterable[str] = ENGINE_NAMES) -> None:
    """Add a hidden flag for each."""
    for name in names:
        flags = ["--" + name.replace("_", "-")]
        if name in _SHORT:
            flags.insert(0, _SHORT[name])
        behaviour: dict[str, Any] = {"type": any_value}
        if name.startswith(_SWITCHES):
            behaviour = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(*flags, dest=name, default=None, help=argparse.SUPPRESS, **behaviour)


def foreign_options(args: argparse.Namespace, names: Iterable[str] = ENGINE_NAMES) -> dict[str, Any]:
    """What was given of them, under vLLM's names."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}
