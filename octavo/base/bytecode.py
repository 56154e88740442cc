"""`kept_bytecode`: where what Python compiles is kept if it has no other place.

Many images have packages without bytecode (uv writes none unless told to) and PYTHONDONTWRITEBYTECODE: each
start compiles torch's sources then, which takes longer than all else.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from octavo.base import env
from octavo.base.ownership import is_private


@contextmanager
def kept_bytecode() -> Iterator[None]:
    """What is imported meanwhile is kept in octavo's cache folder, where torch has no bytecode of its own.

    Not in one that is open to others: they could run code here.
    """
    before = sys.pycache_prefix, sys.dont_write_bytecode
    spec = None if "torch" in sys.modules else find_spec("torch")
    if spec is not None and spec.cached and not Path(spec.cached).exists():
        source = Path(spec.cached).parents[1]
        if sys.dont_write_bytecode or not os.access(source, os.W_OK):
            with suppress(OSError, RuntimeError):  # there is no home, or nothing can be written there
                folder = env.cache_dir() / "bytecode"
                folder.mkdir(0o700, parents=True, exist_ok=True)
                if is_private(folder.lstat()):
                    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before
