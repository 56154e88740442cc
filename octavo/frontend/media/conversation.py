"""Images in the messages of a conversation: taken out of them, in order, before the chat template sees the
rest.

A template writes a marker for each image. What a user writes stays text, even if it is the text of a marker:
such texts are broken by `BREAK`, at which the rendered prompt is cut before it is tokenized.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.base.errors import RequestError
from octavo.config.engine import EngineConfig
from octavo.frontend.media.inputs import MediaURL
from octavo.frontend.media.registry import MARKERS, PROCESSORS
from octavo.frontend.text.tokenizer import Tokenizer

BREAK = "\N{INVISIBLE SEPARATOR}octavo cuts here\N{INVISIBLE SEPARATOR}"
_KINDS = ("image_url", "input_image", "image_pil", "image_embeds", "image")


@dataclass(slots=True)
class ConversationMedia:
    """The images of a conversation, and the messages without them."""

    messages: list[Any] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    uuids: list[str | None] = field(default_factory=list)


def marker_text(config: EngineConfig, tokenizer: Tokenizer | None) -> str:
    """Return the text that stands for an image in a conversation; "" for a model of text alone."""
    if tokenizer is None or config.pooling is not None or config.architecture not in PROCESSORS:
        return ""
    if config.architecture in MARKERS:
        return MARKERS[config.architecture]
    whole = config.checkpoint.config
    number = whole.get("image_token_id", whole.get("image_token_index"))
    return tokenizer.convert_ids_to_tokens([number])[0] if isinstance(number, int) else ""


def take_media(messages: Sequence[Any], marker: str, *, as_parts: bool) -> ConversationMedia:
    """Return the images, and messages in which texts are texts and images are what the template makes
    markers of.

    marker: text of the token that stands for an image
    as_parts: the template reads lists of parts, and writes a marker for {"type": "image"}; otherwise markers
              are put before the message's text, as vLLM does. Raises RequestError.
    """
    taken = ConversationMedia()
    for message in messages:
        if not isinstance(message, Mapping):
            taken.messages.append(message)
            continue
        content = message.get("content")
        rest = {name: _broken(value, marker) for name, value in message.items() if name != "content"}
        parts = [_taken(part, taken, marker) for part in content] if isinstance(content, list) else None
        if parts is None:
            rest["content"] = _broken(content, marker)
        elif as_parts:
            rest["content"] = parts
        else:
            count = sum(_is_image(part) for part in parts)
            texts = [part for part in parts if not _is_image(part)]
            rest["content"] = [{"type": "text", "text": marker} for _ in range(count)] + texts
        taken.messages.append(rest)
    return taken


def _taken(part: Any, taken: ConversationMedia, marker: str) -> Any:
    """Return a part as the template gets it; an image goes to `taken`."""
    kind = _kind(part)
    if kind is None:
        return _broken(part, marker)
    uuid = part.get("uuid")
    taken.images.append(_source(part, kind, named=uuid is not None))
    taken.uuids.append(uuid)
    return {"type": "image"}


def _kind(part: Any) -> str | None:
    if not isinstance(part, Mapping):
        return None
    named = part.get("type")
    if named is None:
        return next((kind for kind in _KINDS if kind in part), None)
    return named if named in _KINDS else None


def _source(part: Mapping[str, Any], kind: str, *, named: bool) -> Any:
    given = part.get("image_url" if kind == "input_image" else kind)
    if isinstance(given, Mapping) and kind == "image_url":
        given = given.get("url")
    if given is None and named:
        return None
    if kind in ("image_url", "input_image", "image") and isinstance(given, str):
        return MediaURL(given)
    if given is None or isinstance(given, str | Mapping):
        raise RequestError(
            f"A content part of type {kind!r} must have its image under {kind!r}: a URL, or an object.",
            "messages",
        )
    return given


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image" and len(part) == 1


def _broken(value: Any, marker: str) -> Any:
    """Return the same value with every text of a marker in it broken."""
    if isinstance(value, str):
        return value.replace(marker, marker[0] + BREAK + marker[1:])
    if isinstance(value, Mapping):
        return {_broken(name, marker): _broken(inner, marker) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_broken(inner, marker) for inner in value]
    return value
