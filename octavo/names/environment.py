"""`envs`: vLLM's variables of the environment as attributes, read when they are asked for.

octavo itself reads its variables in `octavo.base.env`.
"""

import os
from typing import Any

_DEFAULTS: dict[str, Any] = {
    "VLLM_API_KEY": None,
    "VLLM_CACHE_ROOT": os.path.expanduser("~/.cache/vllm"),  # noqa: PTH111  # a str, as vLLM's
    "VLLM_CONFIGURE_LOGGING": True,
    "VLLM_CPU_KVCACHE_SPACE": 0,
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
    "VLLM_ENABLE_V1_MULTIPROCESSING": True,
    "VLLM_HOST_IP": "",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": 5,
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_LOG_STATS_INTERVAL": 10.0,
    "VLLM_PLUGINS": None,
    "VLLM_PORT": None,
    "VLLM_SERVER_DEV_MODE": False,
    "VLLM_TARGET_DEVICE": "cuda",
    "VLLM_USE_MODELSCOPE": False,
    "VLLM_USE_V1": True,
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}
"""Of variables that programs read; the type of each is its default's."""


def is_set(name: str) -> bool:
    """Whether the environment has the variable."""
    return name in os.environ


def __getattr__(name: str) -> Any:
    """Its value; a variable that is neither set nor in the table is an AttributeError."""
    if name not in os.environ:
        if name in _DEFAULTS:
            return _DEFAULTS[name]
        raise AttributeError(f"The variable {name} is not set, and octavo knows no default of it.")
    value, default = os.environ[name], _DEFAULTS.get(name)
    if isinstance(default, bool):
        return value not in ("", "0", "false", "False")
    if isinstance(default, int | float):
        return type(default)(value)
    return value.split(",") if name == "VLLM_PLUGINS" else value
