"""octavo: a high-throughput inference and serving engine for large language models.

The public names. Each is loaded from its home (octavo.names.table) on first use, so that `import octavo`
costs next to nothing.
"""

import sys
from typing import TYPE_CHECKING

from octavo.names.modules import Finder, names_of
from octavo.version import __version__

if TYPE_CHECKING:  # the one place where this is allowed: type checkers cannot follow the table
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
    from octavo.frontend.beam_search.params import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from octavo.frontend.engine import LLMEngine
    from octavo.frontend.outputs.logprobs import FlatLogprobs, Logprob
    from octavo.frontend.outputs.pooling_output import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from octavo.frontend.outputs.request_output import CompletionOutput, RequestOutput
    from octavo.frontend.requests.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
    from octavo.frontend.requests.streaming_input import StreamingInput
    from octavo.llm import LLM
    from octavo.messages.adapters import LoRARequest, LoRASum, PromptAdapterRequest
    from octavo.messages.pooling import PoolingParams
    from octavo.messages.sampling import RepetitionDetectionParams, RequestOutputKind, SamplingParams
    from octavo.messages.structured import GuidedDecodingParams, StructuredOutputsParams
    from octavo.runtime.models.registry import ModelRegistry
    from octavo.runtime.sampling.processors import Processor as LogitsProcessor
    from octavo.runtime.sampling.request_functions import AdapterLogitsProcessor
    from octavo.runtime.weight_transfer.sender import WeightSender

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
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "EngineDead",
    "FlatLogprobs",
    "GuidedDecodingParams",
    "LLMEngine",
    "LogitsProcessor",
    "LoRARequest",
    "LoRASum",
    "Logprob",
    "ModelRegistry",
    "OctavoError",
    "Overloaded",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptAdapterRequest",
    "PromptTooLong",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StreamingInput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UnknownModel",
    "Unsupported",
    "WeightSender",
    "__version__",
]


__getattr__ = names_of(__name__)
"""Loads a public name from its home (PEP 562)."""


def __dir__() -> list[str]:
    return sorted(__all__)


sys.meta_path.append(Finder())
