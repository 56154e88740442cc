"""`read_prompt`: what a router must know of a body: how long the prompt is, its beginnings, and its session.

The servers share whole blocks of tokens. Token ids are taken as they are; text and conversations as the
model's tokenizer and chat template write them, if the router has these. Without, blocks of as many characters
as a block of tokens has on average: text in the order in which templates write it, tools and system first.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import msgspec

from octavo.base.errors import RequestError
from octavo.frontend.client.placement import BLOCK

_CHARS_PER_TOKEN = 4
_MOST_BLOCKS = 128


class Tokenizer(Protocol):
    """A model's tokenizer, as a router needs it (frontend/text/tokenizer)."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Raises RequestError."""

    def apply_chat_template(self, conversation: Any, *, tools: Any = None) -> str | list[int]:
        """Return the tokens of a conversation. Raises RequestError."""


class _Body(msgspec.Struct):
    """The fields that matter here; others, and what they hold, are the servers' business."""

    model: Any = None
    prompt: Any = None
    input: Any = None
    messages: Any = None
    instructions: Any = None
    system: Any = None
    tools: Any = None
    cache_salt: Any = None
    session_id: Any = None
    prompt_cache_key: Any = None
    user: Any = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request, as the router sees it. num_tokens: about."""

    num_tokens: int = 0
    beginnings: Sequence[Hashable] = ()
    session: str = ""


def read_prompt(body: bytes, tokenizer: Tokenizer | None = None) -> Prompt:
    """Return what is known of a body; of one that is no JSON object, nothing."""
    try:
        asked = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Prompt()
    session = next(
        (s for s in (asked.session_id, asked.prompt_cache_key, asked.user) if isinstance(s, str)), ""
    )
    root = hash((str(asked.model), str(asked.cache_salt)))
    ids = asked.prompt if asked.prompt is not None else asked.input
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        ids = ids[0]
    if isinstance(ids, list) and all(isinstance(token, int) for token in ids[:BLOCK]):
        return Prompt(len(ids), list(_chain(root, ids, BLOCK)), session)
    if tokenizer is not None and (tokens := _tokens(asked, ids, tokenizer)) is not None:
        return Prompt(len(tokens), list(_chain(root, tokens, BLOCK)), session)
    text = "\0".join(_texts(asked))
    return Prompt(len(text) // _CHARS_PER_TOKEN, list(_chain(root, text, BLOCK * _CHARS_PER_TOKEN)), session)


def _tokens(asked: _Body, prompt: Any, tokenizer: Tokenizer) -> list[int] | None:
    """Return the prompt as the servers will see it, up to what the answer begins with; None if unknown."""
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    messages = asked.messages if isinstance(asked.messages, list) else prompt
    try:
        if isinstance(first, str):
            return tokenizer.encode(first)
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            return None
        given = asked.system or asked.instructions
        system = [{"role": "system", "content": given}] if given else []
        rendered = tokenizer.apply_chat_template([*system, *messages], tools=asked.tools)
    except (RequestError, TypeError, ValueError, LookupError):  # the server will say what is wrong
        return None
    return rendered if isinstance(rendered, list) else None


def _chain(key: int, content: Sequence[Any], size: int) -> Iterator[int]:
    """Yield a key for each beginning of whole blocks."""
    starts = range(0, len(content) - size + 1, size)
    for start in islice(starts, _MOST_BLOCKS):
        block = content[start : start + size]
        key = hash((key, block if isinstance(block, str) else str(block)))
        yield key


def _texts(value: Any) -> Iterator[str]:
    """Yield all text of a body's prompt, in order."""
    match value:
        case _Body():
            for part in (
                value.tools,
                value.system,
                value.instructions,
                value.messages,
                value.prompt,
                value.input,
            ):
                yield from _texts(part)
        case str():
            yield value
        case list():
            for entry in value:
                yield from _texts(entry)
        case dict():
            for name, entry in value.items():
                if name != "cache_control":  # a breakpoint moves on from turn to turn
                    yield from _texts(entry)
