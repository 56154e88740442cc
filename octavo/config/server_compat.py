"""vLLM's options of `serve` that octavo has not, or has under another name; the server's half of `compat`."""

from collections.abc import Callable
from typing import Any

from octavo.config.compat import Foreign

_OFF: tuple[Any, ...] = (False, 0, "", {}, [])
_LATER = "is not supported yet"
_LOGS = "OCTAVO_LOGGING_LEVEL and VLLM_LOGGING_CONFIG_PATH say what is logged; bodies never are."


def _ignored(text: str, *neutral: Any) -> Foreign:
    return Foreign((*_OFF, *neutral), text, is_refused=False)


SERVER_FOREIGN: dict[str, Foreign] = {
    "middleware": Foreign(_OFF, "No code is loaded by name into the server: put a proxy in front of it."),
    "headless": Foreign(_OFF, f"More than one machine {_LATER}."),
    "grpc": Foreign(_OFF, "octavo speaks HTTP, server-sent events and WebSocket."),
    "enable_ssl_refresh": Foreign(_OFF, "Certificates are read once: restart the server to renew them."),
    "trust_request_chat_template": Foreign(_OFF, "A template never comes from a request: --chat-template."),
    "lora_modules": Foreign(_OFF, f"LoRA {_LATER}: merge the adapter into the model's weights."),
    "enable_auto_tool_choice": _ignored("The format of tool calls says it: --tool-call-parser.", True),
    "tool_parser_plugin": Foreign(_OFF, "No code is loaded by name into the server."),
    "tool_server": Foreign(_OFF, f"A server of tools {_LATER}."),
    "exclude_tools_when_tool_choice_none": _ignored("Tools are not shown to the model yet.", True),
    "enable_tokenizer_info_endpoint": Foreign(_OFF, f"/tokenizer_info {_LATER}."),
    "enable_server_load_tracking": _ignored("/load always tells.", True),
    "enable_log_outputs": _ignored(_LOGS),
    "enable_log_deltas": _ignored(_LOGS, True),
    "log_error_stack": _ignored(_LOGS, True),
    "log_config_file": _ignored(_LOGS),
    "max_log_len": _ignored(_LOGS),
    "uvicorn_log_level": _ignored(_LOGS, "info", "debug", "warning", "error", "critical", "trace"),
    "disable_access_log_for_endpoints": _ignored("Probes are not logged."),
    "h11_max_header_count": _ignored("A request may have 100 header lines.", 256),
    "enable_offline_docs": _ignored("/docs always works offline."),
}

SERVER_ALIASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "disable_uvicorn_access_log": ("disable_access_log", bool),
    "disable_fastapi_docs": ("disable_page", bool),
    "h11_max_incomplete_event_size": ("max_header_bytes", int),
}
"""vLLM's name → octavo's, and the value in octavo's terms."""
