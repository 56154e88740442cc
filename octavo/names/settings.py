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


_CLASSES = """AttentionConfig CompilationConfig EPLBConfig KVEventsConfig LoadConfig PoolerConfig
    ProfilerConfig SpeculativeConfig StructuredOutputsConfig WeightTransferConfig"""
globals().update({name: type(name, (Settings,), {"__module__": __name__}) for name in _CLASSES.split()})

CompilationMode = IntEnum(
    "CompilationMode", "NONE STOCK_TORCH_COMPILE DYNAMO_TRACE_ONCE VLLM_COMPILE", start=0
)
"""How vLLM compiles; octavo compiles no graphs."""

CUDAGraphMode = IntEnum("CUDAGraphMode", "NONE PIECEWISE FULL FULL_DECODE_ONLY FULL_AND_PIECEWISE", start=0)
"""What vLLM records; octavo records whole steps, unless enforce_eager."""


class UsageContext(StrEnum):
    """Who uses an engine; it makes no difference here, and nothing is reported to anybody."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
