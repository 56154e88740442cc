"""How configs are declared. `option`: a field with its explanation, for flags, YAML keys and docs."""

from collections.abc import Mapping
from copy import copy
from dataclasses import field, fields
from typing import Any, TypeVar

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


class Concern(type):
    """Makes a config of its own options; keeps the others for `concerns.from_concerns`, which judges them.

    So users may write a config with options of any concern, in vLLM's way to group them.
    """

    def __call__(cls, **options: Any) -> Any:
        """None means the default."""
        names = {field.name for field in fields(cls)}  # type: ignore[arg-type]  # they are dataclasses
        given = {name: value for name, value in options.items() if value is not None}
        config = super().__call__(**{name: given.pop(name) for name in names & given.keys()})
        if given:
            vars(config)["elsewhere"] = given
        return config


def options_elsewhere(config: object) -> Mapping[str, Any]:
    """What a config was given that belongs to another, or to vLLM alone."""
    given: Mapping[str, Any] = vars(config).get("elsewhere", {})
    return given
