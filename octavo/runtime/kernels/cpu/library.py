"""Loads the compiled kernels: ctypes signatures of the functions that cpu/*.cpp export."""

import ctypes
from pathlib import Path

from octavo.base import env
from octavo.base.log import get_logger
from octavo.runtime.kernels.build import shared_library

logger = get_logger(__name__)

_C_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}

_ARGUMENTS = {
    "octavo_matmul": "plllpllippi",
    "octavo_matmul_int8": "plllpllippi",
    "octavo_dequantize": "plllipi",
    "octavo_write_kv": "plplpilllpli",
    "octavo_attention": "pllpilllplppiflfpi",
    "octavo_rms_norm": "pllllpfplppi",
    "octavo_rope": "pllllpplii",
    "octavo_activation": "plliipi",
}
"""Per function, one letter for each parameter: p pointer, l int64, i int, f float."""


def load_library() -> ctypes.CDLL | None:
    """The kernels, compiled if need be; None when they are disabled or cannot be had."""
    if env.kernels_disabled():
        return None
    path = shared_library()
    return None if path is None else open_library(path)


def open_library(path: Path) -> ctypes.CDLL:
    """The functions of a library, with their signatures."""
    library = ctypes.CDLL(str(path))
    for name, letters in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = [_C_TYPES[letter] for letter in letters]
        function.restype = None
    return library
