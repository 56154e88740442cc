"""Memory straight from the system: zeros, whose pages take memory only once they are written.

Large pages where there are any: kernels that do little arithmetic are up to a quarter faster on them.
"""

import ctypes
import mmap
from contextlib import suppress

_LARGE_BYTES = 1 << 20


def return_large_blocks() -> None:
    """Have glibc map large blocks one by one, so that each goes back to the system when it is freed.

    Left alone, it takes the largest one freed for usual, and keeps such in the heap of every thread.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(-3, _LARGE_BYTES)  # M_MMAP_THRESHOLD


def zero_pages(num_bytes: int) -> mmap.mmap:
    """New memory of this process alone; it goes when nothing uses it any more."""
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # what is shared has small pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system was built without large ones
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
