"""`EngineConfig`: every decision made, for the engine and its workers (it crosses processes as msgpack)."""

import time
from dataclasses import dataclass, field, replace

import msgspec

from octavo.base.errors import ConfigError
from octavo.config.cache import CacheConfig
from octavo.config.checkpoint import Checkpoint
from octavo.config.front import FrontConfig
from octavo.config.lora import LoRAConfig
from octavo.config.media import MediaConfig
from octavo.config.model import ModelConfig
from octavo.config.observability import ObservabilityConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.pooling import PoolingConfig
from octavo.config.scheduling import SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The resolved options by concern, and the checkpoint they belong to."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    observability: ObservabilityConfig
    checkpoint: Checkpoint
    front: FrontConfig = field(default_factory=FrontConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    pooling: PoolingConfig | None = None
    """None: the model generates text."""
    draft: "EngineConfig | None" = None
    """Of the model that guesses tokens, if there is one."""
    created_s: float = field(default_factory=time.time)
    """Wall time; the same in all processes of an engine."""
    fit_max_model_len: bool = False
    """max_model_len may be lowered at the start to what the cache has room for."""

    @property
    def architecture(self) -> str:
        """The model's, in the registry of architectures."""
        return self.pooling.architecture if self.pooling else self.checkpoint.architecture

    @property
    def served_names(self) -> list[str]:
        """What the model is called outside; the first in metrics too."""
        return [name for name in self.observability.served_model_name if name] or [self.model.model]

    @property
    def tokens_per_block(self) -> int:
        """Return how many tokens have their keys and values in a block of all ranks."""
        return self.cache.block_size * self.parallel.decode_context_parallel_size

    def with_max_model_len(self, max_model_len: int) -> "EngineConfig":
        """The same for requests of another length."""
        return replace(self, model=replace(self.model, max_model_len=max_model_len))

    def to_msgpack(self) -> bytes:
        """This config as bytes for another process. Raises ConfigError for a value that is not plain data."""
        try:
            return msgspec.msgpack.encode(self)
        except (TypeError, ValueError, OverflowError) as error:
            reason = f"The configuration holds a value that cannot be sent to the engine: {error}"
            raise ConfigError(reason) from error

    @classmethod
    def from_msgpack(cls, content: bytes) -> "EngineConfig":
        """The inverse of `to_msgpack`. Raises ConfigError for a field of the wrong type."""
        try:
            return msgspec.msgpack.decode(content, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"The configuration has a field of the wrong type: {error}") from error
