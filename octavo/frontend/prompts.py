"""The forms in which a prompt may be given, and their reading.

Called by the input processor; `TextPrompt`, `TokensPrompt` and `PromptType` are public.
"""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from octavo.base.errors import RequestError, Unsupported

_LATER = ("prompt_embeds", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "encoder_prompt")


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    """Prompts share cached blocks only under the same salt."""


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is its text, if known, for the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt in its one inner form; at least one of `text` and `token_ids` is there, and ids win."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str = ""


def parse_prompt(prompt: PromptType) -> ParsedPrompt:
    """Read any form of prompt. Raises RequestError for none of them, Unsupported for forms still to come."""
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(None, _token_ids(prompt))
    if later := [key for key in _LATER if prompt.get(key) is not None]:
        raise Unsupported(f"A prompt with {later[0]} is not supported yet: give prompt or prompt_token_ids.")
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if text is None and ids is None:
        raise RequestError("Either prompt or prompt_token_ids must be provided.", "prompt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt must be a string, got {type(text).__name__}.", "prompt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError("cache_salt must be a non-empty string if provided.", "cache_salt")
    return ParsedPrompt(text, None if ids is None else _token_ids(ids), salt or "")


def _token_ids(ids: Any) -> list[int]:
    if not isinstance(ids, Iterable):
        raise RequestError(
            f"A prompt must be a string, a list of token ids or a dict, got {type(ids).__name__}.", "prompt"
        )
    listed = list(ids)
    if set(map(type, listed)) <= {int}:
        return listed
    try:
        if bool in set(map(type, listed)):
            raise TypeError
        return [operator.index(i) for i in listed]
    except TypeError:
        raise RequestError("prompt_token_ids must hold integers only.", "prompt_token_ids") from None
