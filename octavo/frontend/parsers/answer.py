"""`AnswerParser`: an answer through a reasoning parser, and what is not reasoning through a tool parser.

One per sequence; made by the chat routes.
"""

from octavo.frontend.parsers.events import Event, Text, coalesced
from octavo.frontend.parsers.scanner import Parser


class AnswerParser:
    """Either parser may be missing; where one does both jobs, it is given once."""

    def __init__(self, reasoning: Parser | None, calls: Parser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return sum(parser.num_calls for parser in (self._reasoning, self._calls) if parser)

    def feed(self, delta: str) -> list[Event]:
        """What the next piece of text adds."""
        events: list[Event] = self._reasoning.feed(delta) if self._reasoning else [Text(delta)]
        return coalesced(self._through(events))

    def finish(self) -> list[Event]:
        """What was held back."""
        events = self._through(self._reasoning.finish() if self._reasoning else [])
        return coalesced(events + (self._calls.finish() if self._calls else []))

    def _through(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        read: list[Event] = []
        for event in events:
            if isinstance(event, Text):
                read += self._calls.feed(event.text)
            else:
                read.append(event)
        return read
