"""The only reader of the environment: every variable octavo looks at, with its meaning."""

import os
from collections.abc import Mapping
from pathlib import Path

from octavo.base.errors import ConfigError

_DEFAULT_CACHE_HOME = "~/.cache"
_LOG_LEVEL = ("OCTAVO_LOGGING_LEVEL", "VLLM_LOGGING_LEVEL", "VLLM_LOG_LEVEL")
_REPORTED = ("OCTAVO_", "VLLM_", "OMP_", "MKL_", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "CXX")
_OPTIONS = {
    "log_stats_interval_s": ("OCTAVO_LOG_STATS_INTERVAL", "VLLM_LOG_STATS_INTERVAL"),
    "media_fetch_timeout": ("OCTAVO_IMAGE_FETCH_TIMEOUT", "VLLM_IMAGE_FETCH_TIMEOUT"),
    "video_fetch_timeout": ("OCTAVO_VIDEO_FETCH_TIMEOUT", "VLLM_VIDEO_FETCH_TIMEOUT"),
    "audio_fetch_timeout": ("OCTAVO_AUDIO_FETCH_TIMEOUT", "VLLM_AUDIO_FETCH_TIMEOUT"),
    "stall_timeout": ("OCTAVO_STALL_TIMEOUT", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
}
"""By option; the first that is set counts."""
LEAST_NODE_KEY = 16
"""Characters."""
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def log_level() -> str:
    """OCTAVO_LOGGING_LEVEL (also VLLM_LOGGING_LEVEL, VLLM_LOG_LEVEL): DEBUG, INFO, WARNING, ERROR."""
    return _first(*_LOG_LEVEL, otherwise="INFO").upper()


def log_level_is_given() -> bool:
    """Whether one of those is set."""
    return bool(_first(*_LOG_LEVEL))


def cache_dir() -> Path:
    """Where compiled kernels, assembled models and the like are kept.

    OCTAVO_CACHE_DIR: the folder of kernels, assembled models and homeless bytecode (default ~/.cache/octavo).
    XDG_CACHE_HOME: an absolute path, in which octavo/ is then the default.
    """
    if given := os.environ.get("OCTAVO_CACHE_DIR"):
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME", "")
    return Path(home if home.startswith("/") else _DEFAULT_CACHE_HOME).expanduser() / "octavo"


def kernels_disabled() -> bool:
    """OCTAVO_NO_CPU_KERNELS=1: use the torch references instead of the compiled CPU kernels."""
    return _is_on("OCTAVO_NO_CPU_KERNELS")


def cpu_isa() -> str:
    """OCTAVO_CPU_ISA: the best instruction set that CPU kernels may use: amx, avx512_bf16, avx512, avx2; on
    ARM bf16, i8mm, dotprod, neon.
    """
    return os.environ.get("OCTAVO_CPU_ISA", "")


def fault() -> str:
    """OCTAVO_FAULT=site:action@k: makes a named site fail at its k-th use (tests of faults only)."""
    return os.environ.get("OCTAVO_FAULT", "")


def api_keys() -> list[str]:
    """OCTAVO_API_KEY, VLLM_API_KEY: keys that requests to a server may bear, one each."""
    return _keys("OCTAVO_API_KEY", "VLLM_API_KEY")


def admin_api_keys() -> list[str]:
    """OCTAVO_ADMIN_API_KEY: a key for the server's admin verbs."""
    return _keys("OCTAVO_ADMIN_API_KEY")


def openai_api_key() -> str:
    """OPENAI_API_KEY: the key that `octavo chat --url` and `complete --url` send."""
    return os.environ.get("OPENAI_API_KEY", "")


def dev_mode() -> bool:
    """OCTAVO_SERVER_DEV_MODE=1 (also VLLM_SERVER_DEV_MODE): the same as the server's flag --dev-mode."""
    return _is_on("OCTAVO_SERVER_DEV_MODE") or _is_on("VLLM_SERVER_DEV_MODE")


def lora_folder() -> str:
    """OCTAVO_LORA_FOLDER, VLLM_LORA_RESOLVER_CACHE_DIR: the same as the server's --lora-folder."""
    return _first("OCTAVO_LORA_FOLDER", "VLLM_LORA_RESOLVER_CACHE_DIR")


def may_update_loras() -> bool:
    """OCTAVO_ALLOW_RUNTIME_LORA_UPDATING=1 (also VLLM_ALLOW_RUNTIME_LORA_UPDATING): as the server's flag."""
    names = "OCTAVO_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    return any(os.environ.get(name, "").lower() in ("1", "true") for name in names)


def compiler() -> str:
    """CXX: the C++ compiler for CPU kernels (default g++)."""
    return _first("CXX", otherwise="g++")


def offline() -> bool:
    """HF_HUB_OFFLINE=1: never ask a model hub."""
    return _is_on("HF_HUB_OFFLINE")


def plugins() -> list[str] | None:
    """OCTAVO_PLUGINS, VLLM_PLUGINS: names of the plug-ins to load, with commas between; unset = all."""
    for name in ("OCTAVO_PLUGINS", "VLLM_PLUGINS"):
        if name in os.environ:
            return [plugin.strip() for plugin in os.environ[name].split(",") if plugin.strip()]
    return None


def logging_config() -> Path | None:
    """OCTAVO_LOGGING_CONFIG_PATH, VLLM_LOGGING_CONFIG_PATH: JSON for logging.config.dictConfig."""
    path = _first("OCTAVO_LOGGING_CONFIG_PATH", "VLLM_LOGGING_CONFIG_PATH")
    return Path(path) if path else None


def option_defaults() -> dict[str, float]:
    """Engine options that the environment decides where the user does not. Raises ConfigError.

    OCTAVO_LOG_STATS_INTERVAL, VLLM_LOG_STATS_INTERVAL: seconds, for log_stats_interval_s.
    OCTAVO_IMAGE_FETCH_TIMEOUT, VLLM_IMAGE_FETCH_TIMEOUT: seconds, for media_fetch_timeout.
    OCTAVO_VIDEO_FETCH_TIMEOUT, VLLM_VIDEO_FETCH_TIMEOUT: seconds, for video_fetch_timeout.
    OCTAVO_AUDIO_FETCH_TIMEOUT, VLLM_AUDIO_FETCH_TIMEOUT: seconds, for audio_fetch_timeout.
    OCTAVO_STALL_TIMEOUT, VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS: seconds, for stall_timeout.
    """
    found = {option: _number(*names) for option, names in _OPTIONS.items()}
    return {option: value for option, value in found.items() if value is not None}


def keep_alive_s() -> float | None:
    """OCTAVO_HTTP_TIMEOUT_KEEP_ALIVE, VLLM_HTTP_TIMEOUT_KEEP_ALIVE: seconds, for keep_alive_timeout."""
    return _number("OCTAVO_HTTP_TIMEOUT_KEEP_ALIVE", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE")


def cpu_cache_gib() -> float:
    """OCTAVO_CPU_KVCACHE_SPACE, VLLM_CPU_KVCACHE_SPACE: GiB of KV cache on CPU; 0 = octavo decides."""
    return _number("OCTAVO_CPU_KVCACHE_SPACE", "VLLM_CPU_KVCACHE_SPACE") or 0.0


def otlp_protocol() -> str:
    """OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL: grpc or http/protobuf, of traces."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    return _first(*names, otherwise="grpc")


def keep_gpu_kernels(folder: Path) -> None:
    """TRITON_CACHE_DIR: where Triton keeps what it has compiled; a snapshot has a folder of its own."""
    if os.access(folder, os.W_OK):
        os.environ["TRITON_CACHE_DIR"] = str(folder)


def for_child(fixed: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """A child process's environment: this one's, with `fixed` set, and `defaults` where it says nothing."""
    return {**defaults, **os.environ, **fixed}


def node_key() -> str:
    """OCTAVO_NODE_KEY: the secret by which the nodes of an engine know each other."""
    return os.environ.get("OCTAVO_NODE_KEY", "").strip()


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


def _first(*names: str, otherwise: str = "") -> str:
    """Return the first of these variables that is set and not empty."""
    return next((value for name in names if (value := os.environ.get(name))), otherwise)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def _keys(*names: str) -> list[str]:
    return [key for name in names if (key := os.environ.get(name, "").strip())]


def _number(*names: str) -> float | None:
    """Return the first of these variables that is set, as a number. Raises ConfigError."""
    name = next((name for name in names if os.environ.get(name)), None)
    try:
        return None if name is None else float(os.environ[name])
    except ValueError:
        raise ConfigError(f"The variable {name}={os.environ[str(name)]!r} must be a number.") from None
