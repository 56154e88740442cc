"""Memory straight from the system: zeros, whose pages take memory only once they are written.

Large pages where there are any: kernels that do little arithmetic are up to a quarter faster on them.
"""

import ctypes
import mmap
from contextlib import suppress

_LARGE_BYTES, _KEPT_BYTES = 16 << 20, 32 << 20
_libc = ctypes.CDLL(None)


def return_large_blocks() -> None:
    """Have glibc map blocks of 16 MiB one by one, so that each goes back to the system when it is freed.

    Left alone, it takes the largest one freed for usual, and keeps such in the heap of every thread. Smaller
    ones are used again, as pages from the system cost more than to fill them, until `return_freed_blocks`.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(-3, _LARGE_BYTES)  # M_MMAP_THRESHOLD
        _libc.mallopt(-1, _KEPT_BYTES)  # M_TRIM_THRESHOLD


def return_freed_blocks() -> None:
    """Give the system what glibc keeps for later blocks; for whoever has been idle for a while."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def zero_pages(num_bytes: int) -> mmap.mmap:
    """New memory of this process alone; it goes when nothing uses it any more."""
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # what is shared has small pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system was built without large ones
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
