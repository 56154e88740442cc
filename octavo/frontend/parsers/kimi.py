"""Kimi K2: a section of `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.

The name before the arguments is the call's id; the template shows it to the model in later turns.
PLaMo 3 has such a section too.
"""

from octavo.frontend.parsers.call_object import call
from octavo.frontend.parsers.scanner import Move
from octavo.frontend.parsers.section import SectionParser


class KimiParser(SectionParser):
    """Text, then a section of calls."""

    BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"

    def call(self) -> Move[None]:
        """An id, from which the name follows, and arguments."""
        call_id, _ = yield from self.take_name("<|tool_call_argument_begin|>")
        yield from call(self, call_id.removeprefix("functions.").rpartition(":")[0] or call_id, call_id)


class PlamoParser(SectionParser):
    """PLaMo 3."""

    BEGIN, END = "<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"
    CALL, CALL_END = "<|plamo:begin_tool_request:plamo|>", "<|plamo:end_tool_request:plamo|>"

    def call(self) -> Move[None]:
        """A name and arguments, between tags of their own."""
        yield from self.take_name("<|plamo:begin_tool_name:plamo|>")
        name, _ = yield from self.take_name("<|plamo:end_tool_name:plamo|>")
        yield from self.take_name("<|plamo:begin_tool_arguments:plamo|>")
        yield from self.take_name("<|plamo:msg|>")
        yield from call(self, name)
