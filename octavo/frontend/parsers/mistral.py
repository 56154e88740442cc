"""Mistral: `[TOOL_CALLS]` before a JSON list of calls, or before each `name{…}` (also `name[ARGS]{…}`)."""

from octavo.frontend.parsers.call_object import arguments, call_list, call_object
from octavo.frontend.parsers.scanner import Malformed, Move, Parser

_OPEN = "[TOOL_CALLS]"


class MistralParser(Parser):
    """Text, then calls."""

    shows_special_tokens = True

    def read(self) -> Move[None]:
        """The format."""
        while (yield from self.copy_until(self.text, _OPEN)):
            char = yield from self.skip_space()
            move = call_list if char == "[" else call_object if char == "{" else _named
            yield from self.attempt(move(self), _OPEN)


def _named(parser: Parser) -> Move[None]:
    """The name outside of the JSON, perhaps with the call's id behind it."""
    name: list[str] = []
    while (char := (yield from parser.peek())) not in ("{", "["):
        if not char:
            raise Malformed
        name.append((yield from parser.take()))
    if char == "[":
        marker = yield from parser.take_until("[ARGS]")
        if not marker[1]:
            raise Malformed
    parser.start_call("".join(name).strip())
    yield from arguments(parser)
