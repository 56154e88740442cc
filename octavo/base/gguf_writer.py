"""Writes a GGUF file: metadata, the table of tensors, then their bytes, one tensor after the other.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3, little endian).
"""

import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from octavo.base.gguf import BLOCK_TYPES, MAGIC

_ALIGNMENT = 32
_NUMBERS = {bool: (7, "<?"), int: (5, "<i"), float: (6, "<f")}
_STRING, _ARRAY, _UNSIGNED, _LONG = 8, 9, 4, 10
_TYPE_IDS = {kind.name: number for number, kind in BLOCK_TYPES.items()}


class Entry(NamedTuple):
    """A row of the table of tensors; `shape` is in torch's order."""

    name: str
    shape: tuple[int, ...]
    type_name: str

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor."""
        kind = BLOCK_TYPES[_TYPE_IDS[self.type_name]]
        return prod(self.shape) // kind.block * kind.num_bytes


def write_gguf(
    path: Path, metadata: Mapping[str, Any], table: list[Entry], contents: Iterable[bytes]
) -> None:
    """Write a file, which is there once it is whole. contents: of the tensors, in the order of `table`."""
    head = bytearray(MAGIC + struct.pack("<IQQ", 3, len(table), len(metadata)))
    for key, value in metadata.items():
        head += _string(key) + _value(value)
    offset = 0
    for entry in table:
        shape = entry.shape[::-1]
        head += _string(entry.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", _TYPE_IDS[entry.type_name], offset)
        offset += -(-entry.num_bytes // _ALIGNMENT) * _ALIGNMENT
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(head + bytes(-len(head) % _ALIGNMENT))
            for entry, content in zip(table, contents, strict=True):
                assert len(content) == entry.num_bytes, entry
                file.write(content)
                file.write(bytes(-len(content) % _ALIGNMENT))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """Return type and bytes of a value: counts are unsigned, but in lists."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, list):
        kind = type(value[0]) if value else str
        if kind is str:
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
        number, layout = _NUMBERS[kind]
        return struct.pack("<IIQ", _ARRAY, number, len(value)) + struct.pack(
            f"<{len(value)}{layout[1]}", *value
        )
    if type(value) is int and value >= 0:
        return struct.pack("<II", _UNSIGNED, value) if value < 1 << 32 else struct.pack("<IQ", _LONG, value)
    number, layout = _NUMBERS[type(value)]
    return struct.pack("<I", number) + struct.pack(layout, value)
