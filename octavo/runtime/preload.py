"""What takes long before torch computes and needs no Python, on threads. Imports no torch itself.

Binding its libraries takes a quarter of a second, or half with CUDA, during which an import holds the
interpreter's lock; a foreign call does not. `begin` is asked by name where an engine is about to be made in
this process: config and tokenizer are read meanwhile. `make_context` has a GPU made ready beside the import.
A process that ends before that (a model that does not exist) waits: it would pull the library down under the
thread that sets it up.
"""

import ctypes
import importlib.metadata  # noqa: F401 - needs a library, too, and would have to wait for the loader's lock
import os
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from octavo.metrics import nvml

_LIBRARIES = "libtorch_cuda.so", "libtorch_cpu.so"  # the first needs the second


def begin() -> None:
    """Return at once. Where there is no such library, the import will say what is missing."""
    found = None if "torch" in sys.modules else find_spec("torch")
    if found is None or found.origin is None:
        return
    folder = Path(found.origin).parent / "lib"
    for path in [path for name in _LIBRARIES if (path := folder / name).exists()][:1]:
        nvml.library()  # which would wait until that is done
        bind = ctypes.CDLL(None).dlopen
        bind.restype = ctypes.c_void_p
        call = (os.fsencode(path), os.RTLD_NOW | os.RTLD_LOCAL)
        threading.Thread(target=bind, args=call, name="preload").start()


def make_context(device: str) -> None:
    """Return at once. Where there is no such GPU, torch will say so."""
    kind, _, number = device.partition(":")
    if kind == "cuda":
        threading.Thread(target=_make_context, args=(int(number or 0),), name="make-context").start()


def _make_context(number: int) -> None:
    """Have the driver make the context that torch will use: a third of a second."""
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if not (driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), number)):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
