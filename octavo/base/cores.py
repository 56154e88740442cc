"""`usable_cores`: how many cores this process may use, which may be fewer than the machine has."""

import os


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
