"""`Parser`: the base of all parsers, and the few moves that they are written in.

A parser is one generator, `read`, written as if the whole text were there: where it needs text that has not
come yet, a move waits for the next `feed`. So every split of the stream takes the same path through the same
code, and since text is passed on or collected once, time is linear. Moves are used with `yield from`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TypeVar

from octavo.frontend.parsers.events import CallArguments, CallStart, Event, Reasoning, Text, coalesced

T = TypeVar("T")
Move = Generator[None, None, T]
Sink = Callable[[str], object]
_SPACE = " \t\r\n"
_SCALAR_END = ",]}" + _SPACE


class Malformed(Exception):
    """The text is not what the format says; `Parser.attempt` turns it into plain text."""


def drop(text: str) -> None:
    """Sink of what nobody needs."""


class Parser(ABC):
    """One answer on its way from text to events; made anew for each sequence."""

    shows_special_tokens = False
    """True when the format is written in special tokens, which the detokenizer must not leave out then."""

    def __init__(self) -> None:
        self._buffer = ""
        self._at = 0
        self._is_whole = False
        self._events: list[Event] = []
        self._record: list[str] | None = None
        """Everything consumed since `attempt` began."""
        self._kind: type[Text | Reasoning] = Text
        self._space = ""
        """At the end of that kind's text, held back: dropped when something else follows."""
        self.num_calls = 0
        self._run = self.read()
        self._is_over = False

    @classmethod
    def reasoning_tags(cls) -> tuple[str, str]:
        """What reasoning stands between; no opening: answers begin inside; no closing: there is none."""
        return "", ""

    @classmethod
    def answer_tags(cls) -> tuple[str, str]:
        """Likewise what stands before an answer that must have a form."""
        return cls.reasoning_tags()

    @abstractmethod
    def read(self) -> Move[None]:
        """The format."""

    def feed(self, delta: str) -> list[Event]:
        """What the next piece of text adds."""
        self._buffer = self._buffer[self._at :] + delta
        self._at = 0
        return self._advance()

    def finish(self) -> list[Event]:
        """What was held back; nothing may be fed afterwards."""
        self._is_whole = True
        events = self._advance()
        if self._space and not self.num_calls:
            events.append(self._kind(self._space))
        return coalesced(events)

    def _advance(self) -> list[Event]:
        if not self._is_over:
            try:
                next(self._run)
            except StopIteration:
                self._is_over = True
        events, self._events = self._events, []
        return coalesced(events)

    # ---- what is found

    def text(self, text: str) -> None:
        """Part of the answer."""
        self._pass(Text, text)

    def reasoning(self, text: str) -> None:
        """Part of the reasoning."""
        self._pass(Reasoning, text)

    def start_call(self, name: str, call_id: str = "") -> None:
        """A call; `arguments` belong to it from now on."""
        if not name:
            raise Malformed
        self._space, self._record = "", None
        self._events.append(CallStart(self.num_calls, name, call_id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Part of the last call's arguments."""
        self._events.append(CallArguments(self.num_calls - 1, text))

    # ---- moves

    def peek(self, count: int = 1) -> Move[str]:
        """The next `count` characters, fewer at the end of the text; they stay."""
        while len(self._buffer) - self._at < count and not self._is_whole:
            yield
        return self._buffer[self._at : self._at + count]

    def take(self, count: int = 1) -> Move[str]:
        """The next `count` characters, fewer at the end of the text."""
        taken = yield from self.peek(count)
        self._consume(len(taken))
        return taken

    def expect(self, literal: str) -> Move[None]:
        """Exactly this. Raises Malformed."""
        if (yield from self.take(len(literal))) != literal:
            raise Malformed

    def take_space(self) -> Move[str]:
        """White space, all there is."""
        parts: list[str] = []
        while (char := (yield from self.peek())) and char in _SPACE:
            parts.append(self._consume(1))
        return "".join(parts)

    def skip_space(self) -> Move[str]:
        """Past white space, to the next character, which is returned and stays; "" at the end."""
        yield from self.take_space()
        return (yield from self.peek())

    def copy_until(self, sink: Sink, *markers: str) -> Move[str]:
        """Hand text to `sink` up to the first of the markers, which is consumed and returned; "" at the end.

        No marker may contain another.
        """
        while True:
            found = [(at, m) for m in markers if (at := self._buffer.find(m, self._at)) >= 0]
            if found:
                at, marker = min(found)
                sink(self._consume(at - self._at))
                self._consume(len(marker))
                return marker
            held = 0 if self._is_whole else _held(self._buffer, self._at, markers)
            sink(self._consume(len(self._buffer) - self._at - held))
            if self._is_whole:
                return ""
            yield

    def copy_rest(self, sink: Sink) -> Move[None]:
        """Hand all that follows to `sink`."""
        while True:
            sink(self._consume(len(self._buffer) - self._at))
            if self._is_whole:
                return
            yield

    def take_until(self, *markers: str) -> Move[tuple[str, str]]:
        """The text up to the first of the markers, and the marker."""
        parts: list[str] = []
        marker = yield from self.copy_until(parts.append, *markers)
        return "".join(parts), marker

    def copy_json(self, sink: Sink) -> Move[None]:
        """Hand one JSON value to `sink` as it is written, white space included. Raises Malformed."""
        char = yield from self.skip_space()
        if char == '"':
            yield from self._copy_string(sink)
        elif char and char in "{[":
            yield from self._copy_nested(sink)
        elif char and char not in _SCALAR_END:
            while (char := (yield from self.peek())) and char not in _SCALAR_END:
                sink(self._consume(1))
        else:
            raise Malformed

    def json_string(self) -> Move[str]:
        """A JSON string's value. Raises Malformed."""
        if (yield from self.skip_space()) != '"':
            raise Malformed
        parts: list[str] = []
        yield from self._copy_string(parts.append)
        try:
            value = json.loads("".join(parts), strict=False)
        except ValueError:
            raise Malformed from None
        assert isinstance(value, str)
        return value

    def attempt(self, move: Move[None], opening: str = "") -> Move[bool]:
        """Make a move; when it turns out malformed before a call was found, all it consumed is text.

        opening: what was consumed before and belongs to it.
        """
        self._record = [opening]
        try:
            yield from move
        except Malformed:
            if self._record is not None:
                self.text("".join(self._record))
            return False
        finally:
            self._record = None
        return True

    def _copy_nested(self, sink: Sink) -> Move[None]:
        """An object or list, to its closing bracket."""
        closers: list[str] = []
        while True:
            char = yield from self.peek()
            if not char:
                raise Malformed
            if char == '"':
                yield from self._copy_string(sink)
                continue
            sink(self._consume(1))
            if char in "{[":
                closers.append("}" if char == "{" else "]")
            elif char in "}]" and closers.pop() != char:
                raise Malformed
            if not closers:
                return

    def _copy_string(self, sink: Sink) -> Move[None]:
        """A string with its quotes."""
        sink((yield from self.take()))
        while True:
            if (yield from self.copy_until(sink, '"', "\\")) == '"':
                sink('"')
                return
            escaped = yield from self.take()
            if not escaped:
                raise Malformed
            sink("\\" + escaped)

    def _pass(self, kind: type[Text | Reasoning], text: str) -> None:
        if kind is not self._kind:
            self._kind, self._space = kind, ""
        solid = text.rstrip(_SPACE)
        if solid:
            self._events.append(kind(self._space + solid))
            self._space = text[len(solid) :]
        else:
            self._space += text

    def _consume(self, count: int) -> str:
        taken = self._buffer[self._at : self._at + count]
        self._at += count
        if self._record is not None:
            self._record.append(taken)
        return taken


def _held(buffer: str, start: int, markers: tuple[str, ...]) -> int:
    """How many characters at the buffer's end may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(buffer) - start), 0, -1):
        tail = buffer[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0
