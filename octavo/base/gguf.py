"""Reads the header of a GGUF file: metadata and the table of tensors. Shared by tokenizer, config and loader.

The file is untrusted: every count, length and offset is checked against the file's size before anything is
allocated, and a fault is a BadCheckpoint that names the file. Tensor bytes are memory-mapped, never copied.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
The usual `gguf` package needs seconds for a vocabulary of 50,000 tokens; this reader needs milliseconds.
"""

import functools
import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octavo.base.errors import BadCheckpoint

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MAX_DIMS = 4


class BlockType(NamedTuple):
    """How a tensor type packs its values: `block` consecutive values take `num_bytes` bytes."""

    name: str
    block: int
    num_bytes: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file; `shape` is in torch's order (outermost axis first)."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int
    num_bytes: int


def open_gguf(path: Path) -> "GGUFFile":
    """The file at `path`, shared: config, tokenizer and loader ask for the same one, whose header is long."""
    stamp = path.stat()
    return _open(path, stamp.st_ino, stamp.st_size, stamp.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _open(path: Path, *stamp: int) -> "GGUFFile":
    del stamp  # another file under the same name is another entry
    return GGUFFile(path)


class GGUFFile:
    """An open GGUF file: `metadata` by key, `tensors` by name, `data(name)` as mapped bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise BadCheckpoint(f"{path}: not a GGUF file (shorter than its header)")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants writable memory
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
            if isinstance(error, BadCheckpoint):
                raise
            raise BadCheckpoint(f"{path}: the GGUF header is damaged ({error})") from error

    def data(self, name: str) -> np.ndarray:
        """The bytes of tensor `name`: uint8 [rows, bytes per row], a private view of the mapped file."""
        info = self.tensors[name]
        flat = np.frombuffer(self._map, np.uint8, info.num_bytes, info.offset)
        rows = prod(info.shape[:-1])
        return flat.reshape(rows, info.num_bytes // rows)

    def _read_header(self) -> None:
        cursor = _Cursor(self._map)
        if cursor.take(4) != MAGIC:
            raise BadCheckpoint(f"{self.path}: not a GGUF file (it does not begin with GGUF)")
        version, num_tensors, num_entries = cursor.unpack("IQQ")
        if version not in (2, 3):
            raise BadCheckpoint(f"{self.path}: GGUF version {version}; versions 2 and 3 can be read")
        if (num_tensors + num_entries) * 8 > len(self._map):
            raise BadCheckpoint(f"{self.path}: the header announces more entries than the file can hold")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = cursor.string()
            if key in self.metadata:
                raise BadCheckpoint(f"{self.path}: metadata key {key!r} stands twice in the header")
            self.metadata[key] = cursor.value(cursor.unpack("I")[0])
        rows = [self._read_tensor_row(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise BadCheckpoint(f"{self.path}: general.alignment is {alignment!r}")
        base = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in rows:
            self._add_tensor(name, shape, type_id, base + offset)
        self._check_overlap()

    def _read_tensor_row(self, cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        num_dims = cursor.unpack("I")[0]
        if not 1 <= num_dims <= _MAX_DIMS:
            raise BadCheckpoint(
                f"{self.path}: tensor {name!r} has {num_dims} axes; 1 to {_MAX_DIMS} are allowed"
            )
        shape = cursor.unpack(f"{num_dims}Q")[::-1]
        type_id, offset = cursor.unpack("IQ")
        return name, shape, type_id, offset

    def _add_tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> None:
        if name in self.tensors:
            raise BadCheckpoint(f"{self.path}: tensor {name!r} stands twice in the header")
        if type_id not in BLOCK_TYPES:
            known = ", ".join(t.name for t in BLOCK_TYPES.values())
            raise BadCheckpoint(f"{self.path}: tensor {name!r} has type {type_id}; supported: {known}")
        kind = BLOCK_TYPES[type_id]
        if prod(shape) == 0 or shape[-1] % kind.block:
            raise BadCheckpoint(
                f"{self.path}: tensor {name!r} of shape {shape} does not fill {kind.name} blocks"
            )
        num_bytes = prod(shape) // kind.block * kind.num_bytes
        if offset + num_bytes > len(self._map):
            raise BadCheckpoint(f"{self.path}: tensor {name!r} ends after the file does (truncated file?)")
        self.tensors[name] = TensorInfo(name, shape, kind, offset, num_bytes)

    def _check_overlap(self) -> None:
        end, last = 0, ""
        for info in sorted(self.tensors.values(), key=lambda t: t.offset):
            if info.offset < end:
                raise BadCheckpoint(f"{self.path}: tensors {last!r} and {info.name!r} overlap")
            end, last = info.offset + info.num_bytes, info.name


class _Cursor:
    """Reads forward through the header; running past the end is a ValueError."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self._buffer):
            raise ValueError("a length points past the end of the file")
        chunk = self._buffer[self.position : end]
        self.position = end
        return chunk

    def unpack(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> str:
        return self.take(self.unpack("Q")[0]).decode("utf-8")

    def value(self, type_id: int) -> Any:
        if type_id in _SCALARS:
            return self.unpack(_SCALARS[type_id])[0]
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            raise ValueError(f"unknown metadata type {type_id}")
        item_type, count = self.unpack("IQ")
        if count > len(self._buffer) - self.position:
            raise ValueError("an array is longer than the file")
        if item_type in _SCALARS:
            return list(self.unpack(f"{count}{_SCALARS[item_type]}"))
        if item_type != _STRING:
            raise ValueError(f"arrays of metadata type {item_type} are not allowed")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """`count` strings; vocabularies have hundreds of thousands, hence a loop without calls of our own."""
        buffer, start, chunks = self._buffer, self.position, []
        for _ in range(count):
            end = start + 8 + _LENGTH.unpack_from(buffer, start)[0]
            chunks.append(buffer[start + 8 : end])
            start = end
        if start > len(buffer):
            raise ValueError("a length points past the end of the file")
        self.position = start
        return [chunk.decode("utf-8") for chunk in chunks]
