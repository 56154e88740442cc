"""What this machine is: versions, processor, memory, GPU, compiler; for `collect-env` and `doctor`.

Asks the system and the package metadata only; imports none of the libraries it reports on.
"""

import platform
import shlex
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from octavo.base import env

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "msgspec", "pyzmq")
_X86_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8")
_CPU_FLAGS = (*_X86_FLAGS, "asimd", "asimddp", "i8mm", "bf16")
_GIB = 1 << 30


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that matter, "missing" for those that are not there."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def cpu_model() -> str:
    """The processor's name."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    """The instruction sets that the CPU kernels care about."""
    flags = set((_cpuinfo().get("flags") or _cpuinfo().get("Features") or "").split())
    return [flag for flag in _CPU_FLAGS if flag in flags]


def memory_bytes() -> tuple[int, int]:
    """(total, available) memory of the machine."""
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def gpus() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU."""
    query = "--query-gpu=name,memory.total,driver_version"
    return first_lines(["nvidia-smi", query, "--format=csv,noheader"], limit=64)


def compiler() -> str:
    """The C++ compiler's own first line; empty when there is none."""
    return next(iter(first_lines([*shlex.split(env.compiler()), "--version"], limit=1)), "")


def first_lines(command: list[str], limit: int) -> list[str]:
    """The first lines that a command prints; none when it is missing or fails."""
    if shutil.which(command[0]) is None:
        return []
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.splitlines()[:limit] if done.returncode == 0 else []


def in_gib(num_bytes: int) -> str:
    """A number of bytes for a person."""
    return f"{num_bytes / _GIB:.1f} GiB"


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())
    }
