"""The compiled kernels: the functions that cpu/*.cpp export, to be called, or recorded and replayed."""

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from octavo.base import env
from octavo.base.log import get_logger
from octavo.runtime.kernels.build import shared_library

logger = get_logger(__name__)

_C_TYPES: "dict[str, type[ctypes._SimpleCData[Any]]]" = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
}
"""By the letters in which a function of the library says what it takes."""

_ERRORS: dict[int, tuple[type[Exception], str]] = {
    1: (MemoryError, "The CPU kernels got no memory for their work space."),
    2: (TimeoutError, "Another rank has not come to a sum for ten minutes."),
}
"""By what a function returns (exported.h)."""


class Products(IntEnum):
    """What a library multiplies bfloat16 by: nothing, vectors (AVX512_BF16, ARM's BF16), AMX's tiles."""

    NONE = 0
    DOTS = 1
    TILES = 2


class CallLog:
    """Calls of the library, as replay.cpp reads them. Others keep alive what the pointers point to."""

    def __init__(self) -> None:
        self.words = array("q")
        self.letters = ""
        """Of each word."""
        self.num_calls = 0

    def note(self, address: int, letters: str, arguments: tuple[float | None, ...]) -> None:
        """Append a call of the function that takes words and is at `address`."""
        self.words.extend((address, len(letters)))
        self.letters += "ll" + letters
        for letter, value in zip(letters, arguments, strict=True):
            self.words.append(_float_bits(value or 0.0) if letter == "f" else int(value or 0))
        self.num_calls += 1

    def places(self, other: "CallLog", lengths: Sequence[tuple[int, int]]) -> list[list[int]] | None:
        """Return which words have the second of each two values where `other` has the first.

        None if the calls differ in other numbers than these.
        """
        found: list[list[int]] = [[] for _ in lengths]
        if self.letters != other.letters:
            return None
        for place, (letter, *values) in enumerate(zip(self.letters, other.words, self.words, strict=True)):
            if letter != "p" and values[0] != values[1]:
                if (pair := tuple(values)) not in lengths:
                    return None
                found[lengths.index(pair)].append(place)
        return found


class Library:
    """The functions of a library, by name. While `call_log` is set, calls are noted there and not made.

    A call raises MemoryError where there is none for its work space, TimeoutError where other ranks are gone.
    """

    def __init__(self, path: Path) -> None:
        self.call_log: CallLog | None = None
        self._library = ctypes.CDLL(str(path))
        self.bfloat16_products = Products(self._library.octavo_bf16_products())
        float_products = self._library.octavo_float_products()
        self.gates_floats, self.prefers_floats = float_products > 0, float_products > 1
        """Products of float weights can end with a gate; and are faster than those of bfloat16."""
        self._replay = self._library.octavo_replay
        self._replay.argtypes = [ctypes.c_void_p, ctypes.c_int64]

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Find a function of the library when it is first asked for."""
        try:
            function = self._function(name)
        except (AttributeError, ValueError):
            raise AttributeError(f"The CPU kernels have no function {name}.") from None
        setattr(self, name, function)
        return function

    def replay(self, log: CallLog) -> None:
        """Make all calls of a log, in order. Raises what a call does."""
        _check(self._replay(log.words.buffer_info()[0], log.num_calls))

    def _function(self, name: str) -> Callable[..., None]:
        pointer = ctypes.c_void_p.in_dll(self._library, f"{name}_checked").value
        text = ctypes.c_char_p.in_dll(self._library, f"{name}_letters").value
        assert pointer is not None and text is not None
        letters = text.decode()
        call = ctypes.CFUNCTYPE(ctypes.c_int, *(_C_TYPES[letter] for letter in letters))(pointer)
        address = ctypes.cast(self._library[f"{name}_recorded"], ctypes.c_void_p).value
        assert address is not None

        def function(*arguments: float | None) -> None:
            if self.call_log is not None:
                self.call_log.note(address, letters, arguments)
            else:
                _check(call(*arguments))

        return function


def load_library(snapshot: Path | None = None) -> Library | None:
    """Return the kernels, compiled if need be; None when they are disabled or cannot be had.

    snapshot: a folder that may have them
    """
    if env.kernels_disabled():
        return None
    path = shared_library(snapshot)
    return None if path is None else Library(path)


def _check(outcome: int) -> None:
    if outcome:
        kind, text = _ERRORS[outcome]
        raise kind(text)


def _float_bits(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
