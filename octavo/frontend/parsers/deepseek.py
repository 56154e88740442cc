"""DeepSeek V3 (`function<sep>name` and a fenced JSON block) and V3.1 (`name<sep>` and JSON)."""

from octavo.frontend.parsers.call_object import call
from octavo.frontend.parsers.scanner import Move
from octavo.frontend.parsers.section import SectionParser

_SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekParser(SectionParser):
    """Text, then one block of calls."""

    BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"

    def call(self) -> Move[None]:
        """A name and arguments."""
        name, _ = yield from self.take_name(_SEPARATOR)
        if name == "function":  # V3
            name, _ = yield from self.take_name("```json")
        yield from call(self, name)
