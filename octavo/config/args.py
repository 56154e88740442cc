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


@dataclass(frozen=True, kw_only=True)
class EngineArgs(ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, FrontConfig, ObservabilityConfig):
    """The union of the concerns' fields: each is declared once, in its own config class."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Build from keyword options; None means the default. Raises ConfigError for an unknown name.

        Options of vLLM's that octavo has not are let pass or refused as `compat` says.
        """
        known = {f.name for f in fields(cls)}
        options = compat.translate(
            {name: value for name, value in options.items() if value is not None}, known
        )
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"Unknown option {', '.join(unknown)}. Known: {', '.join(sorted(known))}.")
        return cls(**options)
