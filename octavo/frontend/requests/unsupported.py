"""What vLLM's methods offer and octavo does not: refused here, with what would work, in one place.

Called by the engines with what their callers gave.
"""

from collections.abc import Mapping
from typing import Any

from octavo.base.errors import Unsupported


def refuse_options(mm_processor_kwargs: Mapping[str, Any] | None = None) -> None:
    """Raise Unsupported for what a request cannot have."""
    if mm_processor_kwargs:
        raise Unsupported("mm_processor_kwargs: octavo serves text only.")
