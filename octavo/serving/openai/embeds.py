"""Prompts given as embeddings over HTTP: base64 of a safetensors file that holds one tensor.

Nothing is unpickled: the file is a header of JSON and plain numbers, which the library of safetensors checks.
"""

import base64
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from octavo.base.errors import RequestError

_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def read_embeds(text: str) -> Any:
    """[num_tokens, hidden_size] of float32. Raises RequestError."""
    try:
        [(_, tensor)] = deserialize(base64.b64decode(text, validate=True))  # type: ignore[no-untyped-call]
        return _as_float32(**tensor)
    except (ValueError, KeyError, SafetensorError) as error:
        raise RequestError(
            "prompt_embeds must be base64 of a safetensors file with one tensor [num_tokens, hidden_size] of "
            f"{', '.join(_TYPES)}, as safetensors.torch.save makes it.",
            "prompt_embeds",
        ) from error


def _as_float32(dtype: str, shape: list[int], data: bytes) -> Any:
    num_tokens, width = shape
    numbers = np.frombuffer(data, _TYPES[dtype]).reshape(num_tokens, width)
    if not numbers.size:
        raise ValueError
    if dtype == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)
