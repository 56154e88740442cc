"""Images and videos in the messages of a conversation: taken out of them, in order, before the chat template
sees the rest.

A template writes a marker for each. What a user writes stays text, even if it is the text of a marker:
such texts are broken by `BREAK`, at which the rendered prompt is cut before it is tokenized.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.base.errors import RequestError
from octavo.config.engine import EngineConfig
from octavo.frontend.media.inputs import MediaURL
from octavo.frontend.media.registry import MARKERS, processors_of
from octavo.frontend.text.tokenizer import Tokenizer

BREAK = "\N{INVISIBLE SEPARATOR}octavo cuts here\N{INVISIBLE SEPARATOR}"
_KINDS = {
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "video_embeds": "video",
    "audio_embeds": "audio",
    "image": "image",
    "video_url": "video",
    "video": "video",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
}
"""Types of parts, and the modality of each."""
_URLS = ("image_url", "input_image", "image", "video_url", "video", "audio_url", "audio")
Markers = Mapping[str, str]
"""Texts that stand for an item, by modality."""


@dataclass(slots=True)
class ConversationMedia:
    """The items of a conversation by modality, and the messages without them."""

    messages: list[Any] = field(default_factory=list)
    items: dict[str, list[Any]] = field(default_factory=dict)
    uuids: dict[str, list[str | None]] = field(default_factory=dict)


def marker_texts(config: EngineConfig, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Return the texts that stand for items in a conversation; none for a model of text alone."""
    if tokenizer is None or not processors_of(config.architecture):
        return {}
    whole = config.checkpoint.config
    numbers = {"image": whole.get("image_token_id", whole.get("image_token_index"))}
    numbers["video"] = whole.get("video_token_id", whole.get("video_token_index"))
    numbers["audio"] = whole.get("audio_token_id", whole.get("audio_token_index"))
    texts = {
        modality: tokenizer.convert_ids_to_tokens([number])[0]
        for modality, number in numbers.items()
        if isinstance(number, int)
    }
    return texts | MARKERS.get(config.architecture, {})


def take_media(messages: Sequence[Any], markers: Markers, *, as_parts: bool) -> ConversationMedia:
    """Return the items, and messages in which texts are texts and items are what the template makes markers
    of.

    as_parts: the template reads lists of parts, and writes a marker for {"type": "image"}; otherwise markers
              are put before the message's text, as vLLM does. Raises RequestError.
    """
    taken = ConversationMedia()
    for message in messages:
        if not isinstance(message, Mapping):
            taken.messages.append(message)
            continue
        content = message.get("content")
        rest = {name: _broken(value, markers) for name, value in message.items() if name != "content"}
        parts = [_taken(part, taken, markers) for part in content] if isinstance(content, list) else None
        if parts is None:
            rest["content"] = _broken(content, markers)
        elif as_parts:
            rest["content"] = parts
        else:
            found = [part["type"] for part in parts if _is_item(part)]
            texts = [part for part in parts if not _is_item(part)]
            rest["content"] = [{"type": "text", "text": markers[modality]} for modality in found] + texts
        taken.messages.append(rest)
    return taken


def take_bare(messages: Sequence[Any]) -> tuple[str, ConversationMedia]:
    """Return the texts and the images of a conversation without a template, for models that embed either."""
    taken = take_media(messages, {"image": BREAK}, as_parts=True)
    contents = [message.get("content") for message in taken.messages if isinstance(message, Mapping)]
    parts = [part for each in contents for part in (each if isinstance(each, list) else [each])]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str)), taken


def _taken(part: Any, taken: ConversationMedia, markers: Markers) -> Any:
    """Return a part as the template gets it; an item goes to `taken`."""
    kind = _kind(part)
    if kind is None:
        return _broken(part, markers)
    modality, uuid = _KINDS[kind], part.get("uuid")
    if modality not in markers:
        raise RequestError(f"At most 0 {modality}(s) may be provided in one prompt.", "messages")
    taken.items.setdefault(modality, []).append(_source(part, kind, named=uuid is not None))
    taken.uuids.setdefault(modality, []).append(uuid)
    return {"type": modality}


def _kind(part: Any) -> str | None:
    if not isinstance(part, Mapping):
        return None
    named = part.get("type")
    if named is None:
        return next((kind for kind in _KINDS if kind in part), None)
    return named if named in _KINDS else None


def _source(part: Mapping[str, Any], kind: str, *, named: bool) -> Any:
    given = part.get("image_url" if kind == "input_image" else kind)
    if isinstance(given, Mapping) and kind in ("image_url", "video_url", "audio_url"):
        given = given.get("url")
    if given is None and named:
        return None
    if kind == "input_audio" and isinstance(given, Mapping) and isinstance(given.get("data"), str):
        return MediaURL(f"data:audio/x;base64,{given['data']}")
    if kind in _URLS and isinstance(given, str):
        return MediaURL(given)
    if kind.endswith("_embeds") and given is not None:
        return _embeds(given, kind)
    if given is None or isinstance(given, str | Mapping):
        raise RequestError(
            f"A content part of type {kind!r} must have its {_KINDS[kind]} under {kind!r}: a URL, or an "
            "object.",
            "messages",
        )
    return given


def _embeds(given: Any, kind: str) -> Any:
    """Return outputs of an encoder whose numbers may be base64 of a file with a tensor."""
    from octavo.frontend.media.embeds_file import read_embeds  # texts alone need none of it

    told = given if isinstance(given, Mapping) else {kind: given}
    if isinstance(text := told.get(kind), str):
        return {**told, kind: read_embeds(text, kind)}
    return given


def _is_item(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _KINDS.values() and len(part) == 1


def _broken(value: Any, markers: Markers) -> Any:
    """Return the same value with every text of a marker in it broken."""
    if isinstance(value, str):
        for marker in markers.values():
            value = value.replace(marker, marker[0] + BREAK + marker[1:])
        return value
    if isinstance(value, Mapping):
        return {_broken(name, markers): _broken(inner, markers) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_broken(inner, markers) for inner in value]
    return value
