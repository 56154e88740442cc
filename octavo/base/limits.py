"""Bounds on what a helper process may take."""

import resource
import sys
from pathlib import Path

_SIZES = Path("/proc/self/statm")


def limit_memory(num_bytes: int, *, further: bool = False) -> None:
    """Let this process have so much address space, and write no core files.

    further: beside what it has. There is no bound where that cannot be known, nor on macOS, which has none.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "darwin":
        return
    if further:
        try:
            num_bytes += int(_SIZES.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        except OSError:
            return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = num_bytes if most == resource.RLIM_INFINITY else min(most, num_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
