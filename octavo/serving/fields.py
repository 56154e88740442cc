"""Fields of requests that are no field of the models: those without an effect here, and those still to come.

Read by `body` and by the documentation of the API; docs/server.md shows the first table.
"""

from collections.abc import Mapping
from typing import Any

from octavo.base.errors import RequestError

IGNORED = {
    "user": "whose request it is; keys tell tenants apart",
    "safety_identifier": "as user",
    "metadata": "notes for OpenAI's dashboard",
    "store": "answers of chat are not kept",
    "service_tier": "there is one",
    "prediction": "a hint for speed",
    "prompt_cache_key": "prefixes are found by content; cache_salt keeps them apart",
    "prompt_cache_retention": "blocks are kept while there is room",
    "session_id": "there is one replica",
    "add_response_role": "the role is always sent",
    "verbosity": "a hint to OpenAI's own models",
}
"""Accepted without an effect: name → why."""

_MEDIA = "octavo serves text only"
LATER = {
    "functions": "use tools",
    "function_call": "use tools and tool_choice",
    "modalities": _MEDIA,
    "audio": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "media_io_kwargs": _MEDIA,
    "web_search_options": "octavo reaches no network",
    "chat_template": "a template never comes from a request; the operator sets one with --chat-template",
    "kv_transfer_params": "there is no KV connector",
    "ec_transfer_params": "there is no encoder cache connector",
    "watermarking": "there are no watermarks",
    "return_token_offsets": "offsets are not known; logprobs have text_offset",
    "suffix": "the model is not told what follows; put it into the prompt in the model's own form",
}
"""Refused when set: name → why, and what would work."""

_NOTHING: tuple[Any, ...] = (None, [], {}, "", False, -1)
ACCEPTED = IGNORED.keys() | LATER.keys()
"""Not unknown."""


def refuse_later(fields: Mapping[str, Any]) -> None:
    """Raise RequestError when a field of `LATER` asks for something; null, empty and -1 ask for nothing."""
    for name in LATER.keys() & fields.keys():
        if fields[name] not in _NOTHING and not _asks_for_text(name, fields[name]):
            raise RequestError(f"{name} is not supported: {LATER[name]}.", name)


def _asks_for_text(name: str, value: object) -> bool:
    return name == "modalities" and value == ["text"]
