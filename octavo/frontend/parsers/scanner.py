"""`Parser`: the base of all parsers, and the few moves that they are written in.

A parser is one generator, `read`, written as if the whole text were there: where it needs text that has not
come yet, a move waits for the next `feed`. So every split of the stream takes the same path through the same
code, and since text is passed on or collected once, time is linear. Moves are used with `yield from`.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import partial
from typing import ClassVar, TypeVar

from octavo.frontend.parsers.events import CallArguments, CallStart, Event, Reasoning, Text, coalesced

T = TypeVar("T")
Move = Generator[None, None, T]
Sink = Callable[[str], object]
_SPACE = " \t\r\n"
_SCALAR_END = ",]}" + _SPACE
_SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null")
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPED = '"\\/bfnrt'
_DEEPEST, _LONGEST_SCALAR = 64, 1024


class Malformed(Exception):
    """The text is not what the format says; before a call has begun, `Parser.attempt` makes it plain text."""


def drop(text: str) -> None:
    """Sink of what nobody needs."""


def refuse_constant(name: str) -> None:
    """Raise ValueError for what Python's JSON has besides JSON: NaN and Infinity."""
    raise ValueError(name)


class Parser(ABC):
    """One answer on its way from text to events; made anew for each sequence."""

    shows_special_tokens = False
    """True when the format is written in special tokens, which the detokenizer must not leave out then."""
    begins: ClassVar[tuple[str, ...]] = ()
    """What begins calls, even where reasoning was not ended before."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Tokens that end a call, even within a string that was not ended before."""

    def __init__(self) -> None:
        self._buffer = ""
        self._at = 0
        self._is_whole = False
        self._events: list[Event] = []
        self._record: list[str] | None = None
        """Everything consumed since `attempt` began."""
        self._kind: type[Text | Reasoning] = Text
        self._space = ""
        """All there is of that kind's text so far, held back: dropped when something else follows."""
        self._is_solid = False
        """Something else than white space has come of that kind."""
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
        self._space, self._is_solid, self._record = "", False, None
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

    def next_is(self, literal: str) -> Move[bool]:
        """Whether this comes next; it stays."""
        while True:
            there = self._buffer[self._at : self._at + len(literal)]
            if there == literal or self._is_whole or not literal.startswith(there):
                return there == literal
            yield

    def take_if(self, literal: str) -> Move[bool]:
        """Past this, if it comes next."""
        if (yield from self.next_is(literal)):
            self._consume(len(literal))
            return True
        return False

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

    def take_name(self, *ends: str) -> Move[tuple[str, str]]:
        """The text up to one of these ends, stripped, and the end. Raises Malformed at a mark before it."""
        text, end = yield from self.take_until(*ends, *(mark for mark in self.marks if mark not in ends))
        if end not in ends:
            self.untake(end)
            raise Malformed
        return text.strip(), end

    def untake(self, marker: str) -> None:
        """Back before a marker that was taken last."""
        self._at -= len(marker)
        if marker and self._record is not None:
            self._record.pop()

    def copy_json(self, sink: Sink, head: str = "", depth: int = 0) -> Move[None]:
        """Hand one JSON value to `sink`, and `head` before it. Raises Malformed, with all brackets closed.

        As it is written, but for what models do and JSON does not: raw control characters and unknown escapes
        are escaped, commas at the end left out.
        """
        char = yield from self.skip_space()
        if char == '"':
            yield from self._copy_string(sink, head)
        elif char and char in "{[" and depth < _DEEPEST:
            yield from self._copy_members(sink, head, depth)
        else:
            scalar = yield from self._scalar()
            sink(head + scalar)

    def json_string(self) -> Move[str]:
        """A JSON string's value. Raises Malformed."""
        if (yield from self.skip_space()) != '"':
            raise Malformed
        parts: list[str] = []
        yield from self._copy_string(parts.append)
        return str(json.loads("".join(parts)))

    def attempt(self, move: Move[None], opening: str = "") -> Move[bool]:
        """Make a move; when it turns out malformed before a call has begun, all it consumed is text.

        opening: what was consumed before and belongs to it.
        Returns whether the move came to its end.
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

    def _copy_members(self, sink: Sink, head: str, depth: int) -> Move[None]:
        """An object or list; what stands before a member is handed over with it."""
        opening = yield from self.take()
        closing = "}" if opening == "{" else "]"
        sink(head + opening)
        try:
            before = yield from self.take_space()
            while not (yield from self.take_if(closing)):
                if opening == "{":
                    before += yield from self._json_key()
                yield from self.copy_json(sink, before, depth + 1)
                space = yield from self.take_space()
                if not (yield from self.take_if(",")):
                    yield from self.expect(closing)
                    break
                before = f"{space},{(yield from self.take_space())}"
        except Malformed:
            sink(closing)
            raise
        sink(closing)

    def _json_key(self) -> Move[str]:
        """A key, and what follows up to its value."""
        if (yield from self.peek()) != '"':
            raise Malformed
        parts: list[str] = []
        yield from self._copy_string(parts.append)
        yield from self.skip_space()
        yield from self.expect(":")
        return f"{''.join(parts)}:{(yield from self.take_space())}"

    def _scalar(self) -> Move[str]:
        parts: list[str] = []
        while (char := (yield from self.peek())) and char not in _SCALAR_END:
            parts.append(self._consume(1))
            if len(parts) > _LONGEST_SCALAR:
                raise Malformed
        if not _SCALAR.fullmatch(scalar := "".join(parts)):
            raise Malformed
        return scalar

    def _copy_string(self, sink: Sink, head: str = "") -> Move[None]:
        sink(head + (yield from self.take()))
        try:
            while marker := (yield from self.copy_until(partial(_escape, sink), '"', "\\", *self.marks)):
                if marker == '"':
                    sink(marker)
                    return
                if marker != "\\":
                    self.untake(marker)
                    break
                sink((yield from self._escape_sequence()))
            raise Malformed
        except Malformed:
            sink('"')
            raise

    def _escape_sequence(self) -> Move[str]:
        char = yield from self.take()
        if not char:
            raise Malformed
        if char == "u":
            digits = yield from self.peek(4)
            if not re.fullmatch("[0-9a-fA-F]{4}", digits):
                return "\\\\u"
            return "\\u" + (yield from self.take(4))
        return f"\\{char}" if char in _ESCAPED else json.dumps(f"\\{char}", ensure_ascii=False)[1:-1]

    def _pass(self, kind: type[Text | Reasoning], text: str) -> None:
        if kind is not self._kind:
            self._kind, self._space, self._is_solid = kind, "", False
        if not self._is_solid:
            if not text.strip(_SPACE):
                self._space += text
                return
            self._is_solid, text, self._space = True, self._space + text, ""
        self._events.append(kind(text))

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


def _escape(sink: Sink, text: str) -> None:
    """Hand over text of a JSON string, in which models write line breaks as they are."""
    sink(_CONTROL.sub(lambda match: json.dumps(match[0])[1:-1], text))
