"""`ChatRenderer`: a conversation to the prompt that the model was trained on.

Called by every front with messages in OpenAI's form. The template is the model's, the operator's (option
`chat_template`: a file, or the template itself) or, from Python only, the caller's; never an HTTP request's.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError, RequestError
from octavo.base.registry import Registry
from octavo.config.engine import EngineConfig
from octavo.frontend.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    suggested_reasoning_parser,
    suggested_tool_parser,
)
from octavo.frontend.parsers.scanner import Parser
from octavo.frontend.prompts import TextPrompt, TokensPrompt
from octavo.frontend.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


class ChatRenderer:
    """The chat template of one engine. Thread-safe."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._template = _read_template(config.model.chat_template)
        shown = self._template or (tokenizer and tokenizer.chat_template) or ""
        front = config.front
        self.tool_parser = _chosen(front.tool_call_parser, TOOL_PARSERS, suggested_tool_parser(shown))
        """Name of the format of tool calls; "" = none."""
        self.reasoning_parser = _chosen(
            front.reasoning_parser, REASONING_PARSERS, suggested_reasoning_parser(shown)
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
        text = self.render_text(messages, chat_template=chat_template, **options)["prompt"]
        assert self._tokenizer is not None
        ids = self._tokenizer.encode(text, add_special_tokens=False)  # the template writes them out
        return TokensPrompt(prompt_token_ids=ids, prompt=text)

    def render_text(
        self, messages: Sequence[Message], *, chat_template: str | None = None, **options: Any
    ) -> TextPrompt:
        """The prompt, as text that holds its special tokens already. Raises RequestError."""
        if self._tokenizer is None:
            raise RequestError(
                "A conversation needs the tokenizer, which skip_tokenizer_init=True left out.", "messages"
            )
        text = self._tokenizer.apply_chat_template(
            messages, chat_template=chat_template or self._template, tokenize=False, **options
        )
        assert isinstance(text, str)
        return TextPrompt(prompt=text)


def _chosen(option: str, parsers: Registry[type[Parser]], suggested: str) -> str:
    """The parser that the option names. Raises ConfigError for an unknown one."""
    if option == "auto":
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
