"""Kimi K2: a section of `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.

The name before the arguments is the call's id; the template shows it to the model in later turns.
"""

from octavo.frontend.parsers.call_object import arguments
from octavo.frontend.parsers.scanner import Malformed, Move, Parser

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiParser(Parser):
    """Text, then a section of calls."""

    shows_special_tokens = True

    def read(self) -> Move[None]:
        """The format."""
        while (yield from self.copy_until(self.text, _BEGIN)):
            opening = _BEGIN
            while (yield from self.take_until(_CALL, _END))[1] == _CALL:
                if not (yield from self.attempt(_call(self), opening + _CALL)):
                    break
                opening = ""
                yield from self.take_until(_CALL_END)


def _call(parser: Parser) -> Move[None]:
    call_id, separator = yield from parser.take_until(_ARGUMENTS)
    if not separator:
        raise Malformed
    call_id = call_id.strip()
    parser.start_call(call_id.removeprefix("functions.").rpartition(":")[0] or call_id, call_id)
    yield from arguments(parser)
