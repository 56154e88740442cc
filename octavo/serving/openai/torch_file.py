"""`read_tensor`: a tensor as torch.save writes it, without torch and without unpickling.

Called by `embeds`. The file is a zip archive with the numbers as they are, and a pickle that says how to put
them together. `pickletools` only splits the pickle into words: it must be the one sentence of a plain tensor.
"""

import io
import math
import pickletools
import zipfile
from typing import Any

import numpy as np

ZIP_MARK = b"PK\x03\x04"
_STORAGES: dict[str, tuple[str, np.dtype[Any]]] = {
    "torch FloatStorage": ("F32", np.dtype("<f4")),
    "torch HalfStorage": ("F16", np.dtype("<f2")),
    "torch BFloat16Storage": ("BF16", np.dtype("<u2")),
}
_SILENT = ("PROTO", "BINPUT", "LONG_BINPUT")
_BEGINNING = ("torch._utils _rebuild_tensor_v2", None, None, "storage")
_END = (None, "collections OrderedDict", None, None, None, None, None)
_MAX_PICKLE_BYTES = 4096
_MAX_NUMBERS = 2**31


def read_tensor(content: bytes) -> tuple[str, "np.ndarray[Any, Any]"]:
    """Type and numbers, bfloat16 as it lies. Raises ValueError for any other file."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            folder = name.removesuffix("data.pkl")
            storage, key, offset, shape, strides = _described(_read(archive, name, _MAX_PICKLE_BYTES))
            data = _read(archive, f"{folder}data/{key}", len(content))
    except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError) as error:
        raise ValueError from error
    name, kind = _STORAGES[storage]
    steps = [step * kind.itemsize for step in strides]
    num_bytes = math.prod(shape) * kind.itemsize
    if max(offset, *shape, *strides) > _MAX_NUMBERS or num_bytes > len(data):
        raise ValueError
    try:
        return name, np.ndarray(shape, kind, data, offset * kind.itemsize, steps)
    except TypeError as error:  # beyond the end of the data
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
