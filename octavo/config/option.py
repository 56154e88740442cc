"""`option`: a config field with its explanation; flags, YAML keys and docs are generated from it."""

from dataclasses import field
from typing import TypeVar

T = TypeVar("T")
TARGET = "module:Class"
"""Among the choices of an option: any class, named by where to import it from."""


def option(default: T, explain: str, choices: tuple[str, ...] = ()) -> T:
    """A dataclass field with a default, a sentence of help and, for closed sets, the allowed values."""
    return field(default=default, metadata={"explain": explain, "choices": choices})
