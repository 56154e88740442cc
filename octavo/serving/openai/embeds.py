"""Prompts given as embeddings over HTTP: base64 of a file that holds one tensor.

Nothing is unpickled. A safetensors file is a header of JSON and plain numbers, which its library checks; one
of torch.save, a zip archive, is read by `torch_file`.
"""

import base64
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from octavo.base.errors import RequestError
from octavo.serving.openai.torch_file import ZIP_MARK, read_tensor

_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def read_embeds(text: str) -> Any:
    """[num_tokens, hidden_size] of float32. Raises RequestError."""
    try:
        content = base64.b64decode(text, validate=True)
        if content.startswith(ZIP_MARK):
            return _as_float32(*read_tensor(content))
        [(_, tensor)] = deserialize(content)  # type: ignore[no-untyped-call]
        numbers = np.frombuffer(tensor["data"], _TYPES[tensor["dtype"]])
        return _as_float32(tensor["dtype"], numbers.reshape(tensor["shape"]))
    except (ValueError, KeyError, SafetensorError) as error:
        raise RequestError(
            "prompt_embeds must be base64 of a safetensors file with one tensor [num_tokens, hidden_size] of "
            f"{', '.join(_TYPES)}, as safetensors.torch.save makes it, or of what torch.save makes of one.",
            "prompt_embeds",
        ) from error


def _as_float32(dtype: str, numbers: "np.ndarray[Any, Any]") -> Any:
    if numbers.ndim == 3 and numbers.shape[0] == 1:
        numbers = numbers[0]
    if numbers.ndim != 2 or not numbers.size:
        raise ValueError
    if dtype == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)
