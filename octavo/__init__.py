"""octavo: a high-throughput inference and serving engine for large language models.

The public names. Each is loaded from its home on first use, so that `import octavo` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.version import __version__

if TYPE_CHECKING:  # the one place where this is allowed: type checkers cannot follow the table below
    from octavo.base.errors import (
        BadCheckpoint,
        ConfigError,
        EngineDead,
        OctavoError,
        Overloaded,
        PromptTooLong,
        RequestError,
        UnknownModel,
        Unsupported,
    )
    from octavo.config.args import EngineArgs
    from octavo.config.args import EngineArgs as AsyncEngineArgs
    from octavo.frontend.async_engine import AsyncLLM
    from octavo.frontend.async_engine import AsyncLLM as AsyncLLMEngine
    from octavo.frontend.beam_search_params import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from octavo.frontend.engine import LLMEngine
    from octavo.frontend.logprobs import FlatLogprobs, Logprob
    from octavo.frontend.outputs import CompletionOutput, RequestOutput
    from octavo.frontend.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
    from octavo.frontend.streaming_input import StreamingInput
    from octavo.llm import LLM
    from octavo.messages.sampling import RepetitionDetectionParams, RequestOutputKind, SamplingParams
    from octavo.messages.structured import GuidedDecodingParams, StructuredOutputsParams
    from octavo.runtime.models.registry import ModelRegistry
    from octavo.runtime.sampling.custom import AdapterLogitsProcessor
    from octavo.runtime.sampling.processors import Processor as LogitsProcessor

_HOMES = {
    "LLM": "octavo.llm:LLM",
    "LLMEngine": "octavo.frontend.engine:LLMEngine",
    "AsyncLLM": "octavo.frontend.async_engine:AsyncLLM",
    "AsyncLLMEngine": "octavo.frontend.async_engine:AsyncLLM",
    "EngineArgs": "octavo.config.args:EngineArgs",
    "AsyncEngineArgs": "octavo.config.args:EngineArgs",
    "SamplingParams": "octavo.messages.sampling:SamplingParams",
    "BeamSearchParams": "octavo.frontend.beam_search_params:BeamSearchParams",
    "BeamSearchOutput": "octavo.frontend.beam_search_params:BeamSearchOutput",
    "BeamSearchSequence": "octavo.frontend.beam_search_params:BeamSearchSequence",
    "RequestOutputKind": "octavo.messages.sampling:RequestOutputKind",
    "RepetitionDetectionParams": "octavo.messages.sampling:RepetitionDetectionParams",
    "StructuredOutputsParams": "octavo.messages.structured:StructuredOutputsParams",
    "GuidedDecodingParams": "octavo.messages.structured:GuidedDecodingParams",
    "LogitsProcessor": "octavo.runtime.sampling.processors:Processor",
    "AdapterLogitsProcessor": "octavo.runtime.sampling.custom:AdapterLogitsProcessor",
    "ModelRegistry": "octavo.runtime.models.registry:ModelRegistry",
    "Logprob": "octavo.frontend.logprobs:Logprob",
    "FlatLogprobs": "octavo.frontend.logprobs:FlatLogprobs",
    "RequestOutput": "octavo.frontend.outputs:RequestOutput",
    "CompletionOutput": "octavo.frontend.outputs:CompletionOutput",
    "PromptType": "octavo.frontend.prompts:PromptType",
    "TextPrompt": "octavo.frontend.prompts:TextPrompt",
    "EmbedsPrompt": "octavo.frontend.prompts:EmbedsPrompt",
    "TokensPrompt": "octavo.frontend.prompts:TokensPrompt",
    "StreamingInput": "octavo.frontend.streaming_input:StreamingInput",
    "OctavoError": "octavo.base.errors:OctavoError",
    "ConfigError": "octavo.base.errors:ConfigError",
    "BadCheckpoint": "octavo.base.errors:BadCheckpoint",
    "RequestError": "octavo.base.errors:RequestError",
    "PromptTooLong": "octavo.base.errors:PromptTooLong",
    "UnknownModel": "octavo.base.errors:UnknownModel",
    "Overloaded": "octavo.base.errors:Overloaded",
    "EngineDead": "octavo.base.errors:EngineDead",
    "Unsupported": "octavo.base.errors:Unsupported",
}

__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BadCheckpoint",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "ConfigError",
    "EmbedsPrompt",
    "EngineArgs",
    "EngineDead",
    "FlatLogprobs",
    "GuidedDecodingParams",
    "LLMEngine",
    "LogitsProcessor",
    "Logprob",
    "ModelRegistry",
    "OctavoError",
    "Overloaded",
    "PromptTooLong",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StreamingInput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UnknownModel",
    "Unsupported",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
