"""`ChatRenderer`: a conversation to the prompt that the model was trained on.

Called by every front with messages in OpenAI's form. The template is the model's, the operator's (option
`chat_template`: a file, or the template itself) or, from Python only, the caller's; never an HTTP request's.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError, RequestError
from octavo.base.registry import Registry
from octavo.config.engine import EngineConfig
from octavo.frontend.media.conversation import BREAK, ConversationMedia, marker_texts, take_bare, take_media
from octavo.frontend.parsers import registry
from octavo.frontend.parsers.scanner import Parser
from octavo.frontend.requests.prompts import TextPrompt, TokensPrompt
from octavo.frontend.requests.tool_prompt import PARSER as TOLD_PARSER
from octavo.frontend.requests.tool_prompt import with_tool_prompt
from octavo.frontend.text.chat_template import ChatTemplate, compiled_template
from octavo.frontend.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


class ChatRenderer:
    """The chat template of one engine. Thread-safe."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._template = _read_template(config.model.chat_template)
        front = config.front
        self._content_format = front.chat_template_content_format
        self._tells_tools = front.tool_prompt == "auto"
        shown = self._template_for(tools=True) if self.has_template else None
        source = shown.source if shown else ""
        suggested = registry.suggested_tool_parser(source)
        if not suggested and source and self._tells_tools and "tools" not in source:
            suggested = TOLD_PARSER
        self.tool_parser = _chosen(front.tool_call_parser, registry.TOOL_PARSERS, suggested)
        """Name of the format of tool calls; "" = none."""
        self.tool_strict_level = front.tool_strict_level
        self._markers = marker_texts(config, tokenizer)
        pooling = config.pooling
        self._is_bare = pooling is not None and (pooling.is_contrastive or bool(pooling.image_form))
        self.special_tokens = tokenizer.special_tokens if tokenizer else {}
        """Ids by text."""
        self.reasoning_parser = _chosen(
            front.reasoning_parser, registry.REASONING_PARSERS, registry.suggested_reasoning_parser(source)
        )
        """Name of the format of reasoning; "" = none."""

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered without passing a template."""
        return self._template is not None or (
            self._tokenizer is not None and self._tokenizer.chat_template is not None
        )

    def render(
        self, messages: Sequence[Message], *, chat_template: str | None = None, **options: Any
    ) -> TokensPrompt:
        """The prompt, as ids and text; `options` as in ChatTemplate.render. Raises RequestError."""
        media = self._take_media(messages, chat_template, options) if self._markers else None
        asked = media.messages if media else messages
        text = self.render_text(asked, chat_template=chat_template, **options)["prompt"]
        assert self._tokenizer is not None
        pieces = text.split(BREAK) if media else [text]
        encoded = (self._tokenizer.encode(piece, add_special_tokens=False) for piece in pieces if piece)
        prompt = TokensPrompt(prompt_token_ids=list(chain.from_iterable(encoded)), prompt="".join(pieces))
        if media and media.items:
            prompt["multi_modal_data"], prompt["multi_modal_uuids"] = media.items, media.uuids
        return prompt

    def _take_media(
        self, messages: Sequence[Message], chat_template: str | None, options: Mapping[str, Any]
    ) -> ConversationMedia:
        """Take the images out of messages, for the form in which the template reads content."""
        asked = options.get("content_format", "auto")
        form = self._content_format if asked == "auto" else asked
        if form == "auto":
            template = self._template_for(chat_template, tools=bool(options.get("tools")))
            form = template.traits.content_format
        return take_media(messages, self._markers, as_parts=form == "openai")

    def render_prompt(self, messages: Sequence[Message], **options: Any) -> TextPrompt | TokensPrompt:
        """The prompt as text, still to be tokenized; with its ids and images, if the model takes some."""
        if self._is_bare:
            text, media = take_bare(messages)
            bare = TextPrompt(prompt=text)
            if media.items:
                bare["multi_modal_data"], bare["multi_modal_uuids"] = media.items, media.uuids
            return bare
        return self.render(messages, **options) if self._markers else self.render_text(messages, **options)

    def render_text(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        content_format: str = "auto",
        **options: Any,
    ) -> TextPrompt:
        """The prompt, as text that holds its special tokens already. Raises RequestError."""
        if self._tokenizer is None:
            raise RequestError(
                "A conversation needs the tokenizer, which skip_tokenizer_init=True left out.", "messages"
            )
        template = self._template_for(chat_template, tools=bool(tools))
        if self._tells_tools and not template.traits.knows_tools:
            as_system = not tools or template.shows_system
            messages, tools = with_tool_prompt(messages, tools, as_system=as_system), None
        text = self._tokenizer.apply_chat_template(
            messages,
            chat_template=template.source,
            tools=tools,
            tokenize=False,
            content_format=self._content_format if content_format == "auto" else content_format,
            **options,
        )
        assert isinstance(text, str)
        return TextPrompt(prompt=text)

    def _template_for(self, chat_template: str | None = None, *, tools: bool) -> ChatTemplate:
        """The caller's, the operator's or the model's. Raises RequestError when there is none."""
        if source := chat_template or self._template:
            return compiled_template(source)
        assert self._tokenizer is not None
        return self._tokenizer.chat_template_for(tools=tools)


def _chosen(option: str, parsers: Registry[type[Parser]], suggested: str) -> str:
    """Return the option's parser; "auto", "hf" and "beam" leave it to the template. Raises ConfigError."""
    if option in ("auto", "beam", "hf"):
        return suggested
    if option:
        parsers.load(option)
    return option


def _read_template(option: str) -> str | None:
    if not option:
        return None
    if "{" in option:
        return option
    try:
        return Path(option).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"chat_template: the file {option!r} cannot be read ({error.strerror}).") from error
