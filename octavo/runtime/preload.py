"""`begin`: bind torch's largest library on a thread, before torch is imported. Imports no torch itself.

Binding it takes a quarter of a second, during which an import holds the interpreter's lock; a foreign call
does not. Asked by name where an engine is about to be made in this process: config and tokenizer are read
meanwhile. A process that ends before that (a model that does not exist) waits: it would pull the library down
under the thread that sets it up.
"""

import ctypes
import importlib.metadata  # noqa: F401 - needs a library, too, and would have to wait for the loader's lock
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

_LIBRARY = "lib/libtorch_cpu.so"


def begin() -> None:
    """Return at once. Where there is no such library, the import will say what is missing."""
    found = None if "torch" in sys.modules else find_spec("torch")
    if found is None or found.origin is None:
        return
    path = Path(found.origin).parent / _LIBRARY
    if path.exists():
        bind = ctypes.CDLL(None).dlopen
        bind.restype = ctypes.c_void_p
        call = (os.fsencode(path), os.RTLD_NOW | os.RTLD_LOCAL)
        threading.Thread(target=bind, args=call, name="preload").start()
