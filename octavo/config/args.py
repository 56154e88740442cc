"""`EngineArgs`: every option in one flat object, as a user writes them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from octavo.base.errors import ConfigError
from octavo.config import compat
from octavo.config.cache import CacheConfig
from octavo.config.front import FrontConfig
from octavo.config.model import ModelConfig
from octavo.config.observability import ObservabilityConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.scheduling import SchedulerConfig


class _AsUsersWrite(type):
    """Reads the keywords before the dataclass does: None means the default, `compat` knows other names."""

    def __call__(cls, **options: Any) -> Any:
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]  # its only instance is a dataclass
        given = {name: value for name, value in options.items() if value is not None}
        translated = compat.translate(given, known)
        if unknown := sorted(set(translated) - known):
            raise ConfigError(f"Unknown option {', '.join(unknown)}. Known: {', '.join(sorted(known))}.")
        return super().__call__(**translated)


@dataclass(frozen=True, kw_only=True)
class EngineArgs(
    ModelConfig,
    CacheConfig,
    SchedulerConfig,
    ParallelConfig,
    FrontConfig,
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
