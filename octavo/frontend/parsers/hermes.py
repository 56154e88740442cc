"""Hermes and Qwen 2.5/3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere in the text."""

from octavo.frontend.parsers.call_object import call_object
from octavo.frontend.parsers.scanner import Move, Parser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(Parser):
    """Text and calls in turn."""

    shows_special_tokens = True

    def read(self) -> Move[None]:
        """The format."""
        while (yield from self.copy_until(self.text, _OPEN)):
            if (yield from self.attempt(call_object(self), _OPEN)):
                yield from self.take_until(_CLOSE)
