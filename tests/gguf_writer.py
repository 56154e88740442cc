"""Writes small GGUF files byte by byte, right or wrong on purpose. Shares no code with octavo's reader."""

import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

Entry = tuple[str, int, Any]
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
_LAYOUTS = {UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?", UINT64: "<Q"}


class Tensor(NamedTuple):
    """A row of the tensor table; `shape` innermost first, `offset` from the data section."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(type_id: int, content: Any) -> bytes:
    if type_id == STRING:
        return string(content)
    if type_id == ARRAY:
        item_type, items = content
        body = b"".join(value(item_type, item) for item in items)
        return struct.pack("<IQ", item_type, len(items)) + body
    return struct.pack(_LAYOUTS[type_id], content)


def entry(key: str, type_id: int, content: Any) -> bytes:
    return string(key) + struct.pack("<I", type_id) + value(type_id, content)


def gguf_bytes(
    entries: Iterable[Entry] = (),
    tensors: Iterable[Tensor] = (),
    data: bytes = b"",
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    entries, tensors = list(entries), list(tensors)
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    out += b"".join(entry(*e) for e in entries)
    for tensor in tensors:
        out += string(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        out += struct.pack("<IQ", tensor.type_id, tensor.offset)
    return out + b"\0" * (-len(out) % alignment) + data


LLAMA_ENTRIES: list[Entry] = [
    ("general.architecture", STRING, "llama"),
    ("llama.embedding_length", UINT32, 64),
    ("llama.block_count", UINT32, 2),
    ("llama.feed_forward_length", UINT32, 128),
    ("llama.attention.head_count", UINT32, 4),
    ("llama.attention.head_count_kv", UINT32, 2),
    ("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5),
    ("llama.context_length", UINT32, 512),
    ("tokenizer.ggml.tokens", ARRAY, (STRING, ["<s>", "</s>", "a", "b"])),
    ("tokenizer.ggml.eos_token_id", UINT32, 1),
]
