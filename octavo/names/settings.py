"""vLLM's config objects for which octavo has a plain mapping, and its enumerations.

An object is the mapping that the option takes: `config.compat` lets it pass, or refuses it with what would
work.
"""

from enum import IntEnum, StrEnum
from typing import Any


class Settings(dict[str, Any]):
    """Options by name, also as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} was given no {name!r}") from None


class AttentionConfig(Settings):
    """For the option attention_config."""


class CompilationConfig(Settings):
    """For the option compilation_config."""


class KVEventsConfig(Settings):
    """For the option kv_events_config."""


class LoadConfig(Settings):
    """octavo's options of loading are load_format and download_dir."""


class PoolerConfig(Settings):
    """For the option pooler_config."""


class ProfilerConfig(Settings):
    """For the option profiler_config."""


class SpeculativeConfig(Settings):
    """For the option speculative_config."""


class StructuredOutputsConfig(Settings):
    """For the option structured_outputs_config."""


class CompilationMode(IntEnum):
    """How vLLM compiles; octavo compiles no graphs."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(IntEnum):
    """What vLLM records; octavo records whole steps, unless enforce_eager."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = 3
    FULL_AND_PIECEWISE = 4


class UsageContext(StrEnum):
    """Who uses an engine; it makes no difference here, and nothing is reported to anybody."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
