"""JSON calls between two tags: Hermes and Qwen 2.5/3, and families that differ in the tags.

Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere in the text. A tag may also be
followed by a list of calls.
"""

from octavo.frontend.parsers.call_object import call_list, call_object
from octavo.frontend.parsers.scanner import Move, Parser


class HermesParser(Parser):
    """Text and calls in turn."""

    shows_special_tokens = True
    openings: tuple[str, ...] = ("<tool_call>",)
    closing = "</tool_call>"
    """"": there is none."""

    def read(self) -> Move[None]:
        """The format."""
        while opening := (yield from self.copy_until(self.text, *self.openings)):
            if (yield from self.attempt(self._calls(), opening)) and self.closing:
                yield from self.take_until(self.closing)

    def _calls(self) -> Move[None]:
        is_list = (yield from self.skip_space()) == "["
        yield from call_list(self) if is_list else call_object(self)


class GraniteParser(HermesParser):
    """Granite 3."""

    openings, closing = ("<|tool_call|>", "<tool_call>"), ""


class Granite20bParser(HermesParser):
    """Granite 20B, for function calling."""

    openings, closing = ("<function_call>",), ""


class InternLMParser(HermesParser):
    """InternLM 2 and 3."""

    openings, closing = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), "<|action_end|>"


class JambaParser(HermesParser):
    """Jamba, and Hunyuan A13B."""

    openings, closing = ("<tool_calls>",), "</tool_calls>"


class LongCatParser(HermesParser):
    """LongCat."""

    openings, closing = ("<longcat_tool_call>",), "</longcat_tool_call>"


class Phi4MiniParser(HermesParser):
    """Phi-4-mini: a word before the list."""

    openings, closing = ("functools",), ""


class CohereParser(HermesParser):
    """Command R7B and A: `tool_name` in place of `name`."""

    openings, closing = ("<|START_ACTION|>",), "<|END_ACTION|>"
