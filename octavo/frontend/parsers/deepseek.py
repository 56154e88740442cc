"""DeepSeek V3 (`function<sep>name` and a fenced JSON block) and V3.1 (`name<sep>` and JSON)."""

from octavo.frontend.parsers.call_object import arguments
from octavo.frontend.parsers.scanner import Malformed, Move, Parser

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekParser(Parser):
    """Text, then one block of calls."""

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
    name, separator = yield from parser.take_until(_SEPARATOR)
    if not separator:
        raise Malformed
    if name.strip() == "function":  # V3
        name, _ = yield from parser.take_until("```json")
    parser.start_call(name.strip())
    yield from arguments(parser)
