"""The forms in which a prompt may be given, and their reading.

Called by the input processor; `TextPrompt`, `TokensPrompt`, `EmbedsPrompt` and `PromptType` are public.
"""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NotRequired, TypedDict

from octavo.base.errors import RequestError, wrong
from octavo.frontend.media.inputs import MediaInputs, read_inputs
from octavo.frontend.requests.prompt_embeds import ReadEmbeds, read_prompt_embeds
from octavo.messages.media import MediaItem, Source

_MEDIA = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    """Prompts share cached blocks only under the same salt."""
    instruction: NotRequired[str]
    """For embedding models: stands before the text, and may be left out of the mean."""
    pair: NotRequired[str]
    """For cross-encoders: the second text."""
    around: NotRequired[tuple[str, str]]
    """Stands before and behind the text, and is never cut."""
    multi_modal_data: NotRequired[Mapping[str, Any]]
    """Images by modality, one or a list for each marker in the text: {"image": …}."""
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    """Names of theirs, under which they are cached; what is known by its name may be None."""
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    """Entries that replace those of the model's preprocessor_config.json."""


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is its text, if known, for the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings of tokens; `prompt` is its text, if known, for the output."""

    prompt_embeds: Any
    """[num_tokens, hidden_size] of floats, a dense torch tensor or NumPy array."""
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """A prompt of an encoder-decoder in its two parts."""

    encoder_prompt: "str | list[int] | TextPrompt | TokensPrompt"
    """A text for the encoder; or, with `multi_modal_data`, the audio for it."""
    decoder_prompt: NotRequired["str | list[int] | TextPrompt | TokensPrompt | None"]
    """What the output continues; None = what the model begins with."""


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt | ExplicitEncoderDecoderPrompt


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt in its one inner form: `embeds`, or else `token_ids`, or else `text`, is what counts."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str = ""
    embeds: ReadEmbeds | None = None
    instruction: str = ""
    pair: str | None = None
    around: tuple[str, str] | None = None
    media: MediaInputs | None = None
    placed: list[MediaItem] = field(default_factory=list)
    """The same with their places among the tokens."""
    encoder: "ParsedPrompt | None" = None
    """What an encoder reads; the rest is for the decoder."""
    source: Source | None = None
    """The same as the engine gets it."""


def parse_prompt(prompt: PromptType | ParsedPrompt) -> ParsedPrompt:
    """Read any form of prompt. Raises RequestError for none of them."""
    if isinstance(prompt, ParsedPrompt):
        return prompt
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(None, _token_ids(prompt))
    if "encoder_prompt" in prompt:
        return _parse_both(prompt)
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    embeds = prompt.get("prompt_embeds")
    if ids is not None and embeds is not None:
        raise RequestError("Give prompt_token_ids or prompt_embeds, not both.", "prompt_embeds")
    if text is None and ids is None and embeds is None:
        raise RequestError("Either prompt or prompt_token_ids must be provided.", "prompt")
    if text is not None and not isinstance(text, str):
        raise wrong("prompt", f"must be a string, got {type(text).__name__}")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise wrong("cache_salt", "must be a non-empty string if provided")
    return ParsedPrompt(
        text,
        None if ids is None else _token_ids(ids),
        salt or "",
        None if embeds is None else read_prompt_embeds(embeds),
        _text_of(prompt, "instruction") or "",
        _text_of(prompt, "pair"),
        _around_of(prompt),
        read_inputs(*(prompt.get(name) for name in _MEDIA)),
    )


def _parse_both(prompt: Mapping[str, Any]) -> ParsedPrompt:
    encoder, given = parse_prompt(prompt["encoder_prompt"]), prompt.get("decoder_prompt")
    decoder = ParsedPrompt(None, None) if given is None else parse_prompt(given)
    salt = prompt.get("cache_salt") or decoder.cache_salt or encoder.cache_salt
    media = encoder.media or decoder.media
    return replace(decoder, encoder=None if media else encoder, media=media, cache_salt=salt)


def _around_of(prompt: Mapping[str, Any]) -> tuple[str, str] | None:
    given = prompt.get("around")
    if given is None:
        return None
    if not isinstance(given, tuple | list) or [type(text) for text in given] != [str, str]:
        raise wrong("around", "must be two texts")
    return given[0], given[1]


def _text_of(prompt: Mapping[str, Any], name: str) -> str | None:
    value = prompt.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong(name, f"must be a string, got {type(value).__name__}")
    return value


def with_text(prompt: PromptType, text: str | None) -> PromptType:
    """The prompt with its text, for the output, if it does not tell it itself."""
    if text is None or isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        return {"prompt": text, **prompt}  # type: ignore[return-value]  # still one of the forms
    return TokensPrompt(prompt_token_ids=prompt, prompt=text)


def joined_prompt(prompt: PromptType | None, token_ids: list[int] | None) -> PromptType:
    """One prompt out of vLLM's early form, text and ids apart; the ids win, the text is for the output.

    Raises RequestError when both are None.
    """
    if token_ids is None and prompt is None:
        raise RequestError("Either prompt or prompt_token_ids must be provided.", "prompt")
    if token_ids is None:
        return prompt  # type: ignore[return-value]  # not None: told apart above
    if isinstance(prompt, str):
        return TokensPrompt(prompt_token_ids=token_ids, prompt=prompt)
    return TokensPrompt(prompt_token_ids=token_ids)


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
        raise wrong("prompt_token_ids", "must hold integers only") from None
