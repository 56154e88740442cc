"""Kimi K2: a section of `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.

The name before the arguments is the call's id; the template shows it to the model in later turns.
"""

from octavo.frontend.parsers.call_object import arguments
from octavo.frontend.parsers.scanner import Malformed, Move
from octavo.frontend.parsers.section import SectionParser

_ARGUMENTS = "<|tool_call_argument_begin|>"


class KimiParser(SectionParser):
    """Text, then a section of calls."""

    BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"

    def call(self) -> Move[None]:
        """An id, from which the name follows, and arguments."""
        call_id, separator = yield from self.take_until(_ARGUMENTS)
        if not separator:
            raise Malformed
        call_id = call_id.strip()
        self.start_call(call_id.removeprefix("functions.").rpartition(":")[0] or call_id, call_id)
        yield from arguments(self)
