"""Prompts given as embeddings over HTTP: base64 of a safetensors file that holds one tensor.

Nothing is unpickled: the file is a header of JSON and plain numbers, and every length in it is checked.
Format: github.com/huggingface/safetensors
"""

import base64
import math
from typing import Any

import msgspec
import numpy as np

from octavo.base.errors import RequestError

_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class _Tensor(msgspec.Struct):
    """An entry of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_embeds(text: str) -> Any:
    """[num_tokens, hidden_size] of float32. Raises RequestError."""
    try:
        content = base64.b64decode(text, validate=True)
        size = int.from_bytes(content[:8], "little")
        header = msgspec.json.decode(content[8 : 8 + size], type=dict[str, Any])
        [entry] = [value for name, value in header.items() if name != "__metadata__"]
        return _as_float32(msgspec.convert(entry, _Tensor), content[8 + size :])
    except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise RequestError(
            "prompt_embeds must be base64 of a safetensors file with one tensor [num_tokens, hidden_size] of "
            f"{', '.join(_TYPES)}, as safetensors.torch.save makes it.",
            "prompt_embeds",
        ) from error


def _as_float32(tensor: _Tensor, data: bytes) -> Any:
    kind, (start, end) = _TYPES.get(tensor.dtype), tensor.data_offsets
    if kind is None or len(tensor.shape) != 2 or min(tensor.shape) < 1:
        raise ValueError
    if start != 0 or end != len(data) or end != math.prod(tensor.shape) * kind.itemsize:
        raise ValueError
    numbers = np.frombuffer(data, kind).reshape(tensor.shape)
    if tensor.dtype == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)
