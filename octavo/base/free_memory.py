"""`free_bytes`: what of the machine's memory this process may still take; cgroups bound it."""

import os
import sys
from pathlib import Path

import psutil

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


def free_bytes() -> int:
    """Return the memory that the machine has left, or the tightest of the cgroups around this process."""
    return min(_machine_bytes(_PROC), _cgroup_bytes(_PROC, _CGROUPS))


def _machine_bytes(proc: Path) -> int:
    if sys.platform != "linux":
        return psutil.virtual_memory().available
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # hidden
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(available, _UNLIMITED)


def _cgroup_bytes(proc: Path, root: Path) -> int:
    """Return the least limit minus use, over the process's cgroup and all above it; version 2, else 1."""
    left = _UNLIMITED
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # hidden, or not Linux
        return left
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            left = min(left, _folder_bytes(place, *names))
            if place == top:
                break
    return left


def _folder_bytes(folder: Path, limit_name: str, usage_name: str) -> int:
    """Return the memory that one cgroup leaves; page cache that it can drop is free. No limit: unlimited."""
    try:
        limit = (folder / limit_name).read_text(encoding="ascii").strip()
        if limit == "max":
            return _UNLIMITED
        used = int((folder / usage_name).read_text(encoding="ascii"))
        stat = dict(
            line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        )
    except OSError:
        return _UNLIMITED
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
