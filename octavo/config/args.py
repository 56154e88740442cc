"""`EngineArgs`: every option in one flat object, as a user writes them."""

import argparse
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, Self, get_origin

from octavo.base import env
from octavo.base.errors import ConfigError, did_you_mean
from octavo.base.registry import load_object
from octavo.config import compat
from octavo.config.cache import CacheConfig
from octavo.config.engine import EngineConfig
from octavo.config.front import FrontConfig
from octavo.config.lora import LoRAConfig
from octavo.config.media import MediaConfig
from octavo.config.model import ModelConfig
from octavo.config.observability import ObservabilityConfig
from octavo.config.option import Concern
from octavo.config.parallel import ParallelConfig
from octavo.config.scheduling import SchedulerConfig

_ADD_FLAGS = "octavo.cli.flags:add_engine_flags"
_READ_FLAGS = "octavo.cli.flags:engine_options"
_RESOLVE = "octavo.config.resolve:resolve"


class _AsUsersWrite(Concern):
    """Reads the keywords before the dataclass does.

    None means the default, or what the environment says; `compat` knows other names, a field its words.
    What stands first without a name is the model.
    """

    def __call__(cls, first: Any = None, /, **options: Any) -> Any:
        if first is not None:
            options = options | {"model": first}
        known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]  # its only instance is a dataclass
        given = {name: value for name, value in options.items() if value is not None}
        translated = compat.translate(given, known)
        if unknown := sorted(set(translated) - set(known)):
            nearest = did_you_mean(unknown[0], known)
            raise ConfigError(
                f"Unknown option {', '.join(unknown)}. Known: {', '.join(sorted(known))}.{nearest}"
            )
        meant = {name: _meaning(known[name], value) for name, value in translated.items()}
        return super().__call__(**env.option_defaults() | meant)


def _meaning(field: Field[Any], value: Any) -> Any:
    """The value that a word of the field's stands for; one word alone is a list of one."""
    if not isinstance(value, str):
        return value
    is_list = get_origin(field.type) is list
    return [value] if is_list else field.metadata.get("words", {}).get(value, value)


@dataclass(frozen=True, kw_only=True)
class EngineArgs(
    ModelConfig,
    CacheConfig,
    SchedulerConfig,
    ParallelConfig,
    FrontConfig,
    LoRAConfig,
    MediaConfig,
    ObservabilityConfig,
    metaclass=_AsUsersWrite,
):
    """The union of the concerns' fields: each is declared once, in its own config class.

    None means the default. Options of vLLM's that octavo has not are let pass or refused as `compat` says;
    any other name is a ConfigError.
    """

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Build from options under names known only at run time."""
        return cls(**options)

    @staticmethod
    def add_cli_args(
        parser: argparse.ArgumentParser, async_args_only: bool = False
    ) -> argparse.ArgumentParser:
        """Give a parser of the caller's a flag for each option; returns it."""
        if not async_args_only:
            load_object(_ADD_FLAGS)(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """What such a parser has read."""
        return cls(**load_object(_READ_FLAGS)(args))

    def create_engine_config(self, usage_context: object = None) -> EngineConfig:
        """Decide what was left open. Raises ConfigError.

        usage_context: accepted; it makes no difference
        """
        config: EngineConfig = load_object(_RESOLVE)(self)
        return config
