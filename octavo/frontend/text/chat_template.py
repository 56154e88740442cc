"""`ChatTemplate`: turns a conversation into the text of a prompt, by the Jinja template a model brings.

Called by `Tokenizer.apply_chat_template`. Templates differ in what they take, and messages come in every form
of OpenAI's: here the one is made to fit the other. A template sees plain data only. The known ones run here,
in `sandbox`; all others in a `template_process`, which bounds their time and memory.
"""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any, Literal, get_args

import jinja2

from octavo.base import faults
from octavo.base.errors import RequestError, wrong
from octavo.frontend.text.sandbox import SANDBOX, RenderError, rendered
from octavo.frontend.text.template_process import TemplateProcess
from octavo.frontend.text.template_traits import TemplateTraits

ContentFormat = Literal["auto", "string", "openai"]
MAX_OUTPUT_CHARS = 16 * 1024 * 1024
MAX_RENDER_S = 10.0
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"} | {
    *("tokenize", "chat_template", "raise_exception", "strftime_now", "tojson", *_TOKEN_NAMES)
}
_KNOWN = {
    "872be49dbb638044": "SmolLM2",
    "fcf7a096fe99a48f": "ChatML",
    "e8d5b5a546d3f19d": "Llama 2",
    "4f46ecd43418f216": "Llama 3",
    "26a59556925c9873": "Mistral",
    "1e51d5c0fec2f83d": "Gemma",
    "4f39e3a4b9e3d369": "Zephyr",
    "5601fd7b9dac735c": "Phi-3",
    "cd8e9439f0570856": "Qwen 2.5",
    "ea212f3f7adf9810": "DeepSeek V3",
    "b2945f40857ddf20": "Vicuna",
    "38b2554f0f88434d": "Alpaca",
}
"""By their digests: templates that have been read, and do no harm."""
ITEMS = ({"type": "image"}, {"type": "video"}, {"type": "audio"})
"""Parts for which the templates of models for media write a marker."""
_NOT_A_TEMPLATE = (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError)
_MARK = "\N{INVISIBLE SEPARATOR}octavo continues here\N{INVISIBLE SEPARATOR}"


class ChatTemplate:
    """A compiled template. Immutable; compiled on first use."""

    def __init__(self, source: str) -> None:
        self.source = source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        content_format: ContentFormat = "auto",
        special_tokens: Mapping[str, str] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of `messages`. Raises RequestError for a conversation that the template refuses.

        continue_final_message: the prompt ends inside the last message, so that the model goes on with it
        content_format:         how the template reads content: one string, or OpenAI's list of parts
        chat_template_kwargs:   further variables of the template (enable_thinking …), as far as it reads them
        """
        extra = _check_extra(chat_template_kwargs or {}, self.traits.variables)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: set one to False.",
                "continue_final_message",
            )
        if content_format not in get_args(ContentFormat):
            raise RequestError(
                f"chat_template_content_format={content_format!r} is not one of auto, string, openai.",
                "chat_template_content_format",
            )
        conversation = [_message(message, self.traits, content_format) for message in messages]
        if continue_final_message:
            _mark_final(conversation)
        variables = {
            **extra,
            **(special_tokens or {}),
            "messages": conversation,
            "tools": _plain(tools, "tools"),
            "documents": _plain(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        faults.hit("template")
        try:
            text = self._run(variables, MAX_RENDER_S, MAX_OUTPUT_CHARS)
        except RenderError as error:
            raise RequestError(str(error), "messages") from None
        return _cut_at_mark(text) if continue_final_message else text

    @cached_property
    def traits(self) -> TemplateTraits:
        """What it expects. Raises RequestError for a template that is none."""
        try:
            return TemplateTraits.of(SANDBOX.parse(self.source))
        except _NOT_A_TEMPLATE as error:
            raise RequestError(f"The chat template is not valid Jinja: {error}", "chat_template") from None

    @cached_property
    def shows_system(self) -> bool:
        """Whether a system message reaches the model: some templates refuse it, others leave it out."""
        probe = [{"role": "system", "content": _MARK}, {"role": "user", "content": "Hi"}]
        try:
            return _MARK in self.render(probe, special_tokens=dict.fromkeys(_TOKEN_NAMES, ""))
        except RequestError:
            return False

    @cached_property
    def _run(self) -> Callable[[dict[str, Any], float, int], str]:
        if sha256(self.source.encode(errors="replace")).hexdigest()[:16] not in _KNOWN:
            return TemplateProcess(self.source).render
        template = SANDBOX.from_string(self.source)
        return lambda variables, _, max_chars: rendered(template, variables, max_chars)


@lru_cache(maxsize=16)
def compiled_template(source: str) -> ChatTemplate:
    """A template that is likely to be used again."""
    return ChatTemplate(source)


def _check_extra(extra: Mapping[str, Any], known: Set[str]) -> dict[str, Any]:
    """What the template reads of `extra`; the rest would have no effect."""
    if taken := sorted(_RESERVED & extra.keys()):
        raise wrong(
            "chat_template_kwargs", f"may not set {', '.join(taken)}: give the argument of that name instead"
        )
    plain = {name: _plain(value, "chat_template_kwargs") for name, value in extra.items()}
    return {name: plain[name] for name in plain.keys() & known}


def _plain(value: Any, parameter: str) -> Any:
    """A deep copy as JSON data: what a template is given has no methods of ours and no ties to the caller."""
    if value is None:
        return None
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{parameter} must be plain data (JSON types): {error}", parameter) from None


def _message(message: Mapping[str, Any], traits: TemplateTraits, asked: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"Each message must be an object with a 'role', got {message!r:.200}.", "messages")
    given: dict[str, Any] = _plain(dict(message), "messages")
    copy = {name: value for name, value in given.items() if value not in (None, [])}  # these say nothing
    thoughts = copy.get("reasoning", copy.get("reasoning_content"))
    if thoughts is not None:  # templates read the one name or the other
        copy |= {"reasoning": thoughts, "reasoning_content": thoughts}
    if copy["role"] == "developer" and not traits.knows_developer:
        copy["role"] = "system"
    as_parts = (traits.content_format if asked == "auto" else asked) == "openai"
    content = copy.get("content")
    if content is not None:
        copy["content"] = _content(content, as_parts=as_parts)
    elif not traits.tells_missing_content:
        copy["content"] = [] if as_parts else ""
    else:
        copy["content"] = None
    if "tool_calls" in copy:
        copy["tool_calls"] = [_call(call, as_text=traits.takes_arguments_as_text) for call in _calls(copy)]
    return copy


def _content(content: Any, *, as_parts: bool) -> Any:
    if not isinstance(content, str | list):
        raise RequestError(
            f"A message's content must be a string or a list of parts, got {type(content).__name__}.",
            "messages",
        )
    parts = [content] if isinstance(content, str) else content
    if as_parts:
        return [part if part in ITEMS else {"type": "text", "text": _part_text(part)} for part in parts]
    return "\n".join(map(_part_text, parts))


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message["tool_calls"]
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function", {}), dict) for call in calls
    ):
        raise RequestError("tool_calls must be a list of objects, each with a 'function'.", "messages")
    return calls


def _call(call: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    """A call whose arguments have the form that the template reads; what is no JSON stays as it is."""
    holder = call.get("function", call)
    given = holder.get("arguments")
    if as_text and not isinstance(given, str):
        holder["arguments"] = json.dumps(given or {}, ensure_ascii=False)
    elif not as_text and isinstance(given, str | None):
        holder["arguments"] = _read_object(given or "{}")
    return call


def _read_object(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text", "refusal", "thinking"):
        text = part.get("text", part.get(kind))
        if isinstance(text, str):
            return text
    raise RequestError(
        f"A content part of type {kind!r} cannot be used: {{'type': 'text', 'text': …}} is, and of models "
        "that take images, sounds or videos image_url, input_audio, audio_url and video_url.",
        "messages",
    )


def _mark_final(conversation: list[dict[str, Any]]) -> None:
    """Put the mark after the last message's text; the space behind it tells whether the template trims."""
    holder: Any = conversation[-1] if conversation else None
    key = "content"
    if holder and isinstance(holder.get("content"), list) and holder["content"]:
        holder, key = holder["content"][-1], "text"
    if not holder or not isinstance(holder.get(key), str):
        raise RequestError("continue_final_message needs a last message with text to continue.", "messages")
    holder[key] += _MARK + " "


def _cut_at_mark(text: str) -> str:
    """`text` up to the mark; when the template trims content, the spaces before the mark go too."""
    before, found, after = text.rpartition(_MARK)
    if not found:
        raise wrong(
            "continue_final_message",
            "is set, but the chat template does not print the last message's content",
        )
    return before if after.startswith(" ") else before.rstrip()
