"""What the tuner may change: axes, each with choices; a choice is a few options of the engine.

The first choice of an axis is the default (no option). Axes stand in the order in which they matter most.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo.base.errors import ConfigError, did_you_mean

Options = dict[str, Any]


class Axis(NamedTuple):
    """One thing that may be changed."""

    name: str
    choices: tuple[Options, ...]


def default_space(*, num_gpus: int, num_cores: int, rounds: bool) -> list[Axis]:
    """Return the axes for a machine.

    rounds: whether choices that round numbers more, and so may change texts, are among them
    """
    axes = _gpu_axes(num_gpus) if num_gpus else _cpu_axes(num_cores)
    drafts = [{"speculative_config": {"method": "ngram", "num_speculative_tokens": n}} for n in (2, 4)]
    axes.append(Axis("speculation", ({}, *drafts)))
    if rounds and num_gpus:
        axes += [_of("kv_cache_dtype", "fp8"), _of("quantization", "fp8")]
    elif rounds:
        axes += [_of("activations", "int8"), _of("kv_cache_dtype", "int8"), _of("quantization", "int8")]
    return axes


def read_space(path: str, known: Iterable[str]) -> list[Axis]:
    """Return the axes of a JSON file: {"max_num_seqs": [16, 64], …}. Raises ConfigError.

    known: names of options
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--space {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(v, list) and v for v in content.values()):
        raise ConfigError(
            f'--space {path} must hold lists of values by option, as {{"max_num_seqs": [16, 64]}}.'
        )
    known = list(known)
    for name in content:
        if name not in known:
            raise ConfigError(f"--space {path}: {name!r} is no option.{did_you_mean(name, known)}")
    return [Axis(name, ({}, *({name: value} for value in values))) for name, values in content.items()]


def without(axes: Iterable[Axis], fixed: Mapping[str, Any]) -> list[Axis]:
    """Return the axes that change no option which the user has fixed."""
    return [axis for axis in axes if not any(name in fixed for choice in axis.choices for name in choice)]


def _of(name: str, *values: Any) -> Axis:
    return Axis(name, ({}, *({name: value} for value in values)))


def _cpu_axes(num_cores: int) -> list[Axis]:
    threads = sorted({max(1, num_cores - 1), max(1, num_cores // 2)} - {num_cores})
    return [
        _of("max_num_seqs", 4, 8, 32, 64, 128),
        _of("max_num_batched_tokens", 128, 256, 512, 2048),
        _of("cpu_threads", *threads),
        _of("block_size", 32, 64),
    ]


def _gpu_axes(num_gpus: int) -> list[Axis]:
    sizes = [n for n in (1, 2, 4, 8) if n <= num_gpus]
    shapes = [
        {"tensor_parallel_size": tp, "data_parallel_size": dp}
        for tp in sizes
        for dp in sizes
        if 1 < tp * dp <= num_gpus
    ]
    return [
        *([Axis("parallel shape", ({}, *shapes))] if shapes else []),
        _of("max_num_seqs", 32, 64, 128, 512),
        _of("max_num_batched_tokens", 2048, 4096, 16384),
        _of("block_size", 32, 128),
    ]
