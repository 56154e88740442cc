"""The only reader of the environment: every variable octavo looks at, with its meaning."""

import os
from collections.abc import Mapping
from pathlib import Path

_DEFAULT_CACHE = "~/.cache/octavo"
_REPORTED = ("OCTAVO_", "VLLM_", "OMP_", "MKL_", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "CXX")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def log_level() -> str:
    """OCTAVO_LOGGING_LEVEL (also VLLM_LOGGING_LEVEL, VLLM_LOG_LEVEL): DEBUG, INFO, WARNING, ERROR."""
    for name in ("OCTAVO_LOGGING_LEVEL", "VLLM_LOGGING_LEVEL", "VLLM_LOG_LEVEL"):
        if value := os.environ.get(name):
            return value.upper()
    return "INFO"


def cache_dir() -> Path:
    """OCTAVO_CACHE_DIR: where compiled kernels and assembled models are kept (default ~/.cache/octavo)."""
    return Path(os.environ.get("OCTAVO_CACHE_DIR") or _DEFAULT_CACHE).expanduser()


def kernels_disabled() -> bool:
    """OCTAVO_NO_CPU_KERNELS=1: use the torch twins instead of the compiled CPU kernels."""
    return os.environ.get("OCTAVO_NO_CPU_KERNELS", "0") not in ("", "0")


def fault() -> str:
    """OCTAVO_FAULT=site:action@k: makes a named site fail at its k-th use (tests of faults only)."""
    return os.environ.get("OCTAVO_FAULT", "")


def api_keys() -> list[str]:
    """OCTAVO_API_KEY, VLLM_API_KEY: keys that requests to a server may bear, one each."""
    return [key for name in ("OCTAVO_API_KEY", "VLLM_API_KEY") if (key := os.environ.get(name, "").strip())]


def dev_mode() -> bool:
    """OCTAVO_SERVER_DEV_MODE=1 (also VLLM_SERVER_DEV_MODE): the same as the server's flag --dev-mode."""
    names = ("OCTAVO_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE")
    return any(os.environ.get(name, "0") not in ("", "0") for name in names)


def compiler() -> str:
    """CXX: the C++ compiler for CPU kernels (default g++)."""
    return os.environ.get("CXX") or "g++"


def offline() -> bool:
    """HF_HUB_OFFLINE=1: never ask a model hub."""
    return os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")


def for_child(fixed: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """A child process's environment: this one's, with `fixed` set, and `defaults` where it says nothing."""
    return {**defaults, **os.environ, **fixed}


def settings() -> list[str]:
    """NAME=value of each variable set that changes how octavo runs, without secrets; for bug reports."""
    return sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(_REPORTED) and not any(word in name for word in _SECRET)
    )
