"""The import path for logits processors written for vLLM's V1 interface (vllm.v1.sample.logits_processor)."""

from octavo.runtime.sampling.custom import AdapterLogitsProcessor
from octavo.runtime.sampling.indexed import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)

__all__ = [
    "AdapterLogitsProcessor",
    "BatchUpdate",
    "LogitsProcessor",
    "MoveDirectionality",
    "process_dict_updates",
]
