"""Reads of a library for macOS what its loader reads: which system it is for, what it needs and gives.

Source: Apple's <mach-o/loader.h> and <mach-o/nlist.h>.
"""

import struct
from pathlib import Path
from typing import NamedTuple

_MAGIC_64, _ARM64, _DYLIB = 0xFEEDFACF, 0x0100000C, 6
_LOAD_DYLIB, _SYMTAB, _BUILD_VERSION = 0xC, 0x2, 0x32
_MACOS = 1
_EXTERNAL, _PRIVATE, _KIND, _DEFINED = 0x01, 0x10, 0x0E, 0x0E


class Library(NamedTuple):
    """needs: other libraries; undefined: symbols that are theirs."""

    oldest_macos: tuple[int, int]
    needs: set[str]
    exported: set[str]
    undefined: set[str]


def read(path: Path) -> Library:
    """Read an arm64 library. Raises AssertionError for anything else."""
    data = path.read_bytes()
    magic, machine, _, kind, num_commands, *_ = struct.unpack_from("<8I", data)
    assert (magic, machine, kind) == (_MAGIC_64, _ARM64, _DYLIB)
    place, oldest, needs, symbols = 32, (0, 0), set(), {}
    for _ in range(num_commands):
        command, size = struct.unpack_from("<2I", data, place)
        words = struct.unpack_from("<4I", data, place + 8)
        if command == _BUILD_VERSION:
            assert words[0] == _MACOS
            oldest = words[1] >> 16, words[1] >> 8 & 255
        elif command == _LOAD_DYLIB:
            needs.add(_text(data, place + words[0]))
        elif command == _SYMTAB:
            symbols = _symbols(data, *words[:3])
        place += size
    exported = {name for name, kind in symbols.items() if kind & _KIND == _DEFINED}
    return Library(oldest, needs, exported, set(symbols) - exported)


def _symbols(data: bytes, at: int, count: int, texts: int) -> dict[str, int]:
    """Names of those that others see, and their kinds."""
    found = {}
    for i in range(count):
        name, kind = struct.unpack_from("<IB", data, at + 16 * i)
        if kind & _EXTERNAL and not kind & _PRIVATE:
            found[_text(data, texts + name).removeprefix("_")] = kind
    return found


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()
