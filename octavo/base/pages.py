"""Memory straight from the system: zeros, whose pages take memory only once they are written.

Large pages where there are any: kernels that do little arithmetic are up to a quarter faster on them.
"""

import mmap
from contextlib import suppress


def zero_pages(num_bytes: int) -> mmap.mmap:
    """New memory of this process alone; it goes when nothing uses it any more."""
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # what is shared has small pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system was built without large ones
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
