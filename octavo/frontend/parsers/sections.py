"""Formats that put their calls, each between marks of its own, into one marked section."""

from abc import abstractmethod
from typing import ClassVar

from octavo.frontend.parsers.call_object import call
from octavo.frontend.parsers.scanner import Move, Parser


class SectionParser(Parser):
    """Text, then a section of calls."""

    shows_special_tokens = True
    BEGIN: ClassVar[str]
    END: ClassVar[str]
    CALL: ClassVar[str]
    CALL_END: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.begins, cls.marks = (cls.BEGIN,), (cls.END, cls.CALL, cls.CALL_END)

    def read(self) -> Move[None]:
        """The format; a call that is none becomes text, with the marks before it."""
        while (yield from self.copy_until(self.text, self.BEGIN)):
            opening = self.BEGIN
            while (yield from self.take_until(self.CALL, self.END))[1] == self.CALL:
                yield from self.attempt(self.call(), opening + self.CALL)
                opening = ""

    @abstractmethod
    def call(self) -> Move[None]:
        """One call, behind its mark. Raises Malformed."""


class DeepSeekParser(SectionParser):
    """DeepSeek V3 (`function<sep>name` and a fenced JSON block) and V3.1 (`name<sep>` and JSON)."""

    BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"

    def call(self) -> Move[None]:
        name, _ = yield from self.take_name("<｜tool▁sep｜>")
        if name == "function":  # V3
            name, _ = yield from self.take_name("```json")
        yield from call(self, name)


class KimiParser(SectionParser):
    """Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.

    The name before the arguments is the call's id; the template shows it to the model in later turns.
    """

    BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"

    def call(self) -> Move[None]:
        call_id, _ = yield from self.take_name("<|tool_call_argument_begin|>")
        yield from call(self, call_id.removeprefix("functions.").rpartition(":")[0] or call_id, call_id)


class PlamoParser(SectionParser):
    """PLaMo 3."""

    BEGIN, END = "<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"
    CALL, CALL_END = "<|plamo:begin_tool_request:plamo|>", "<|plamo:end_tool_request:plamo|>"

    def call(self) -> Move[None]:
        yield from self.take_name("<|plamo:begin_tool_name:plamo|>")
        name, _ = yield from self.take_name("<|plamo:end_tool_name:plamo|>")
        yield from self.take_name("<|plamo:begin_tool_arguments:plamo|>")
        yield from self.take_name("<|plamo:msg|>")
        yield from call(self, name)
