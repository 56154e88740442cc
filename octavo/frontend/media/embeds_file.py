"""Prompts given as embeddings over HTTP: base64 of a file that holds one tensor.

Nothing is unpickled. A safetensors file is a header of JSON and plain numbers, which its library checks. A
file of torch.save is a zip archive with the numbers as they are, and a pickle that says how to put them
together. `pickletools` only splits the pickle into words: it must be the one sentence of a plain tensor.
"""

import base64
import io
import math
import pickletools
import zipfile
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from octavo.base.errors import wrong

_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_ZIP_MARK = b"PK\x03\x04"
_STORAGES = {"torch FloatStorage": "F32", "torch HalfStorage": "F16", "torch BFloat16Storage": "BF16"}
_SILENT = ("PROTO", "BINPUT", "LONG_BINPUT")
_BEGINNING = ("torch._utils _rebuild_tensor_v2", None, None, "storage")
_END = (None, "collections OrderedDict", None, None, None, None, None)
_MAX_PICKLE_BYTES = 4096
_MAX_NUMBERS = 2**31


def read_embeds(text: str, field: str = "prompt_embeds") -> Any:
    """[num_tokens, hidden_size] of float32. Raises RequestError."""
    try:
        content = base64.b64decode(text, validate=True)
        if content.startswith(_ZIP_MARK):
            return _as_float32(*_read_torch(content))
        [(_, tensor)] = deserialize(content)  # type: ignore[no-untyped-call]
        numbers = np.frombuffer(tensor["data"], _TYPES[tensor["dtype"]])
        return _as_float32(tensor["dtype"], numbers.reshape(tensor["shape"]))
    except (ValueError, KeyError, SafetensorError) as error:
        raise wrong(
            field,
            "must be base64 of a safetensors file with one tensor [num_tokens, hidden_size] of "
            f"{', '.join(_TYPES)}, as safetensors.torch.save makes it, or of what torch.save makes of one",
        ) from error


def _as_float32(dtype: str, numbers: "np.ndarray[Any, Any]") -> Any:
    if numbers.ndim == 3 and numbers.shape[0] == 1:
        numbers = numbers[0]
    if numbers.ndim != 2 or not numbers.size:
        raise ValueError
    if dtype == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)


def _read_torch(content: bytes) -> tuple[str, "np.ndarray[Any, Any]"]:
    """Type and numbers of a tensor, bfloat16 as it lies. Raises ValueError for any other file."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            folder = name.removesuffix("data.pkl")
            storage, key, offset, shape, strides = _described(_read(archive, name, _MAX_PICKLE_BYTES))
            data = _read(archive, f"{folder}data/{key}", len(content))
    except (zipfile.BadZipFile, KeyError, RuntimeError, EOFError) as error:  # it has a password
        raise ValueError from error
    dtype = _STORAGES[storage]
    kind = _TYPES[dtype]
    steps = [step * kind.itemsize for step in strides]
    num_bytes = math.prod(shape) * kind.itemsize
    if max(offset, *shape, *strides) > _MAX_NUMBERS or num_bytes > len(data):
        raise ValueError
    try:
        return dtype, np.ndarray(shape, kind, data, offset * kind.itemsize, steps)
    except (TypeError, OverflowError) as error:  # beyond the end of the data
        raise ValueError from error


def _read(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    """A member that is not compressed."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > max_bytes:
        raise ValueError
    return archive.read(info)


def _described(pickle: bytes) -> tuple[str, str, int, list[int], list[int]]:
    """Storage class, its name in the archive, offset, shape and strides that the pickle says."""
    words = [(code.name, value) for code, value, _ in pickletools.genops(pickle) if code.name not in _SILENT]
    names = [name for name, _ in words]
    values: list[Any] = [value for _, value in words]
    num_dims = next((n for n in (2, 3) if names[11 + n : 12 + n] == [f"TUPLE{n}"]), 0)
    expected = [
        *("GLOBAL", "MARK", "MARK", "BINUNICODE", "GLOBAL", "BINUNICODE", "BINUNICODE", "INT", "TUPLE"),
        *("BINPERSID", "INT", *["INT"] * num_dims, f"TUPLE{num_dims}", *["INT"] * num_dims),
        *(f"TUPLE{num_dims}", "NEWFALSE", "GLOBAL", "EMPTY_TUPLE", "REDUCE", "TUPLE", "REDUCE", "STOP"),
    ]
    plain = ["INT" if name in ("BININT", "BININT1", "BININT2") else name for name in names]
    if plain != expected or (*values[:4],) != _BEGINNING or (*values[-7:],) != _END:
        raise ValueError
    sizes = values[11:]
    return values[4], values[5], values[10], sizes[:num_dims], sizes[num_dims + 1 : 2 * num_dims + 1]
