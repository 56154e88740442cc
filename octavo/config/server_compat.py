"""The server's half of `compat`: options of other servers in octavo's terms."""

from collections.abc import Callable
from typing import Any

SERVER_ALIASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "disable_uvicorn_access_log": ("disable_access_log", bool),
    "disable_fastapi_docs": ("disable_page", bool),
    "h11_max_incomplete_event_size": ("max_header_bytes", int),
}
"""vLLM's name → octavo's, and the value in octavo's terms."""
