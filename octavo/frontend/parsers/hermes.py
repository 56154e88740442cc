"""JSON calls between two tags: Hermes and Qwen 2.5/3, and families that differ in the tags.

Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere in the text. A tag may also be
followed by several calls, or by a list of them.
"""

from typing import ClassVar

from octavo.frontend.parsers.call_object import call, call_list, call_object
from octavo.frontend.parsers.marked import MarkedParser
from octavo.frontend.parsers.scanner import Move


class HermesParser(MarkedParser):
    """Text and calls in turn."""

    openings: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    closing = "</tool_call>"
    begins = tuple(f"<tool_call>{space}{bracket}" for space in ("", "\n", " ") for bracket in "{[")

    def calls(self) -> Move[None]:
        """One object after the other, or a list."""
        if (yield from self.skip_space()) == "[":
            yield from call_list(self)
            return
        yield from call_object(self)
        while (yield from self.skip_space()) == "{":
            yield from call_object(self)


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
    """Jamba, Hunyuan A13B and MiniMax M1."""

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
    marks = ("<|END_ACTION|>",)


class GigaChatParser(HermesParser):
    """GigaChat 3."""

    openings, closing = ("function call<|role_sep|>", "<|function_call|>", "<|message_sep|>"), ""
    marks = ("<|message_sep|>",)

    def block(self, opening: str) -> Move[str]:
        """A call, or what stands between messages, which vanishes."""
        if opening != "<|message_sep|>":
            return (yield from super().block(opening))
        yield from self.skip_space()
        return ""


class ApertusParser(MarkedParser):
    """Apertus: a list of `{"f": {…}}`."""

    openings, closing = ("<|tools_prefix|>",), "<|tools_suffix|>"
    marks = ("<|tools_suffix|>",)

    def calls(self) -> Move[None]:
        """The list."""
        yield from self.expect("[")
        while (yield from self.skip_space()) == "{":
            yield from self.take()
            name = yield from self.json_string()
            yield from self.skip_space()
            yield from self.expect(":")
            yield from call(self, name)
            yield from self.skip_space()
            yield from self.expect("}")
            yield from self.skip_space()
            yield from self.take_if(",")
        yield from self.expect("]")
