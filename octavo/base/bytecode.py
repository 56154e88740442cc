"""`kept_bytecode`: where what Python compiles is kept if it has no other place.

Many images have packages without bytecode (uv writes none unless told to) and PYTHONDONTWRITEBYTECODE: each
start compiles torch's sources then, which takes longer than all else.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from octavo.base import env


@contextmanager
def kept_bytecode() -> Iterator[None]:
    """What is imported meanwhile is kept in octavo's cache folder, where torch has no bytecode of its own."""
    before = sys.pycache_prefix, sys.dont_write_bytecode
    spec = None if "torch" in sys.modules else find_spec("torch")
    if spec is not None and spec.cached and not Path(spec.cached).exists():
        folder = Path(spec.cached).parents[1]  # beside the source
        if sys.dont_write_bytecode or not os.access(folder, os.W_OK):
            sys.pycache_prefix, sys.dont_write_bytecode = str(env.cache_dir() / "bytecode"), False
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before
