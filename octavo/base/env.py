"""The only reader of the environment: every variable octavo looks at, with its meaning."""

import os
from collections.abc import Mapping
from pathlib import Path

from octavo.base.errors import ConfigError

_DEFAULT_CACHE = "~/.cache/octavo"
_LOG_LEVEL = ("OCTAVO_LOGGING_LEVEL", "VLLM_LOGGING_LEVEL", "VLLM_LOG_LEVEL")
_REPORTED = ("OCTAVO_", "VLLM_", "OMP_", "MKL_", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "CXX")
_OPTIONS = {
    "log_stats_interval_s": ("OCTAVO_LOG_STATS_INTERVAL", "VLLM_LOG_STATS_INTERVAL"),
    "stall_timeout": ("OCTAVO_STALL_TIMEOUT", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
}
"""By option; the first that is set counts."""
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def log_level() -> str:
    """OCTAVO_LOGGING_LEVEL (also VLLM_LOGGING_LEVEL, VLLM_LOG_LEVEL): DEBUG, INFO, WARNING, ERROR."""
    for name in _LOG_LEVEL:
        if value := os.environ.get(name):
            return value.upper()
    return "INFO"


def log_level_is_given() -> bool:
    """Whether one of those is set."""
    return any(os.environ.get(name) for name in _LOG_LEVEL)


def cache_dir() -> Path:
    """OCTAVO_CACHE_DIR: where compiled kernels and assembled models are kept (default ~/.cache/octavo)."""
    return Path(os.environ.get("OCTAVO_CACHE_DIR") or _DEFAULT_CACHE).expanduser()


def kernels_disabled() -> bool:
    """OCTAVO_NO_CPU_KERNELS=1: use the torch references instead of the compiled CPU kernels."""
    return os.environ.get("OCTAVO_NO_CPU_KERNELS", "0") not in ("", "0")


def fault() -> str:
    """OCTAVO_FAULT=site:action@k: makes a named site fail at its k-th use (tests of faults only)."""
    return os.environ.get("OCTAVO_FAULT", "")


def api_keys() -> list[str]:
    """OCTAVO_API_KEY, VLLM_API_KEY: keys that requests to a server may bear, one each."""
    return [key for name in ("OCTAVO_API_KEY", "VLLM_API_KEY") if (key := os.environ.get(name, "").strip())]


def admin_api_keys() -> list[str]:
    """OCTAVO_ADMIN_API_KEY: a key for the server's admin verbs."""
    key = os.environ.get("OCTAVO_ADMIN_API_KEY", "").strip()
    return [key] if key else []


def openai_api_key() -> str:
    """OPENAI_API_KEY: the key that `octavo chat --url` and `complete --url` send."""
    return os.environ.get("OPENAI_API_KEY", "")


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


def plugins() -> list[str] | None:
    """OCTAVO_PLUGINS, VLLM_PLUGINS: names of the plug-ins to load, with commas between; unset = all."""
    for name in ("OCTAVO_PLUGINS", "VLLM_PLUGINS"):
        if name in os.environ:
            return [plugin.strip() for plugin in os.environ[name].split(",") if plugin.strip()]
    return None


def logging_config() -> Path | None:
    """OCTAVO_LOGGING_CONFIG_PATH, VLLM_LOGGING_CONFIG_PATH: JSON for logging.config.dictConfig."""
    names = ("OCTAVO_LOGGING_CONFIG_PATH", "VLLM_LOGGING_CONFIG_PATH")
    return next((Path(path) for name in names if (path := os.environ.get(name))), None)


def option_defaults() -> dict[str, float]:
    """Engine options that the environment decides where the user does not. Raises ConfigError.

    OCTAVO_LOG_STATS_INTERVAL, VLLM_LOG_STATS_INTERVAL: seconds, for log_stats_interval_s.
    OCTAVO_STALL_TIMEOUT, VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS: seconds, for stall_timeout.
    """
    return {
        option: _number(name)
        for option, names in _OPTIONS.items()
        for name in reversed(names)
        if os.environ.get(name)
    }


def keep_alive_s() -> float | None:
    """OCTAVO_HTTP_TIMEOUT_KEEP_ALIVE, VLLM_HTTP_TIMEOUT_KEEP_ALIVE: seconds, for keep_alive_timeout."""
    names = ("OCTAVO_HTTP_TIMEOUT_KEEP_ALIVE", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE")
    return next((_number(name) for name in names if os.environ.get(name)), None)


def cpu_cache_gib() -> float:
    """OCTAVO_CPU_KVCACHE_SPACE, VLLM_CPU_KVCACHE_SPACE: GiB of KV cache on CPU; 0 = octavo decides."""
    names = ("OCTAVO_CPU_KVCACHE_SPACE", "VLLM_CPU_KVCACHE_SPACE")
    return next((_number(name) for name in names if os.environ.get(name)), 0.0)


def otlp_protocol() -> str:
    """OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL: grpc or http/protobuf, of traces."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    return next((value for name in names if (value := os.environ.get(name))), "grpc")


def for_child(fixed: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """A child process's environment: this one's, with `fixed` set, and `defaults` where it says nothing."""
    return {**defaults, **os.environ, **fixed}


def launched_rank() -> int:
    """RANK: which of the processes that torchrun started this one is."""
    return int(os.environ.get("RANK", "0"))


def launched_device() -> int:
    """LOCAL_RANK: the same among those of this machine; the number of the GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """WORLD_SIZE: how many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def settings() -> list[str]:
    """NAME=value of each variable set that changes how octavo runs, without secrets; for bug reports."""
    return sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(_REPORTED) and not any(word in name for word in _SECRET)
    )


def _number(name: str) -> float:
    try:
        return float(os.environ[name])
    except ValueError:
        raise ConfigError(f"The variable {name}={os.environ[name]!r} must be a number.") from None
