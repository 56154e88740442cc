"""How users write a config by concern: with options of any concern, in vLLM's way to group them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


class Concern(type):
    """Makes a config of its own options; keeps the others for `concerns.from_concerns`, which judges them."""

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
