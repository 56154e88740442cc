"""Mistral: `[TOOL_CALLS]` before a JSON list of calls, or before each `name{…}` (also `name[ARGS]{…}`)."""

from octavo.frontend.parsers.call_object import call, call_list, call_object
from octavo.frontend.parsers.marked import MarkedParser
from octavo.frontend.parsers.scanner import Move


class MistralParser(MarkedParser):
    """Text, then calls."""

    openings, closing = ("[TOOL_CALLS]",), ""
    marks = openings

    def calls(self) -> Move[None]:
        char = yield from self.skip_space()
        if char in ("[", "{"):
            yield from call_list(self) if char == "[" else call_object(self)
            return
        name, end = yield from self.take_name("[ARGS]", "{")
        if end == "{":
            self.untake(end)
        yield from call(self, name.partition("[CALL_ID]")[0])
