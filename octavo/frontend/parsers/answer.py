"""`AnswerParser`: an answer through one parser after the other, each reading the text the one before left.

One per sequence; made by the chat routes, with a parser of reasoning before one of calls.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from octavo.frontend.parsers.events import Event, Text, coalesced
from octavo.frontend.parsers.scanner import Parser
from octavo.frontend.parsers.think import ThinkParser


class AnswerParser:
    """A chain of parsers."""

    def __init__(self, parsers: Sequence[Parser], note: Callable[[bool], object] | None = None) -> None:
        """note: told in the end whether there were calls."""
        self._parsers = parsers
        self._note = note
        for parser, next_one in pairwise(parsers):
            if isinstance(parser, ThinkParser):
                parser.interruptions = next_one.begins

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return sum(parser.num_calls for parser in self._parsers)

    def feed(self, delta: str) -> list[Event]:
        """What the next piece of text adds."""
        return coalesced(_through(self._parsers, [Text(delta)]))

    def finish(self) -> list[Event]:
        """What was held back; nothing may be fed afterwards."""
        events: list[Event] = []
        for parser in self._parsers:
            events = _through([parser], events) + parser.finish()
        if self._note is not None:
            self._note(self.num_calls > 0)
        return coalesced(events)


def _through(parsers: Sequence[Parser], events: list[Event]) -> list[Event]:
    for parser in parsers:
        read: list[Event] = []
        for event in events:
            read += parser.feed(event.text) if isinstance(event, Text) else [event]
        events = read
    return events
