"""`option`: a config field with its explanation; flags, YAML keys and docs are generated from it."""

from collections.abc import Mapping
from copy import copy
from dataclasses import field
from typing import TypeVar

T = TypeVar("T")
TARGET = "module:Class"
"""Among the choices of an option: any class, named by where to import it from."""


def option(
    default: T, explain: str, choices: tuple[str, ...] = (), *, words: Mapping[str, T] | None = None
) -> T:
    """Return a dataclass field with a default (copied, if it is a list or dict) and a sentence of help.

    choices: the allowed values of a closed set
    words: values that may be given by name
    """
    metadata = {"explain": explain, "choices": choices, "words": words or {}}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)
