"""What vLLM's methods offer and octavo does not: refused here, with what would work, in one place.

Called by the engines with what their callers gave.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from octavo.base.errors import Unsupported

LORA = "LoRA adapters are not supported yet: merge the adapter into the model's weights."


def refuse_options(lora_request: Any = None, mm_processor_kwargs: Mapping[str, Any] | None = None) -> None:
    """Raise Unsupported for what a request cannot have; None, and lists of None, ask for nothing."""
    adapters = lora_request if isinstance(lora_request, Iterable) else [lora_request]
    if any(adapter is not None for adapter in adapters):
        raise Unsupported(LORA)
    if mm_processor_kwargs:
        raise Unsupported("mm_processor_kwargs: octavo serves text only.")
