"""Calls that a grammar has forced: `tool_choice` "required" (a list of calls) or a named tool (arguments)."""

from octavo.frontend.parsers.call_object import call, call_list
from octavo.frontend.parsers.scanner import Move, Parser


class RequiredCallsParser(Parser):
    """The answer is a JSON list of calls."""

    def read(self) -> Move[None]:
        """The format."""
        yield from self.attempt(call_list(self))
        yield from self.copy_rest(self.text)


class NamedCallParser(Parser):
    """The answer is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__()

    def read(self) -> Move[None]:
        """The format."""
        if (yield from self.skip_space()):
            yield from self.attempt(call(self, self._name))
