"""Gemma's function calling: `call:name{key:value}` between special tokens, strings between others.

FunctionGemma: `<start_function_call>call:f{city:<escape>Paris<escape>}<end_function_call>`.
Gemma 4: `<|tool_call>call:f{city:<|"|>Paris<|"|>}<tool_call|>`, and its reasoning in `<|channel>thought`.
"""

import json
from collections.abc import Callable
from typing import ClassVar

from octavo.frontend.parsers.marked import MarkedParser
from octavo.frontend.parsers.scanner import Malformed, Move

_VALUE_END = ",]}"
_DEEPEST, _LONGEST_WORD = 32, 1024


class FunctionGemmaParser(MarkedParser):
    """Text and calls in turn."""

    openings: ClassVar[tuple[str, ...]] = ("<start_function_call>",)
    closing = "<end_function_call>"
    marks = ("<start_function_call>", "<end_function_call>")
    quote: ClassVar[str] = "<escape>"

    def calls(self) -> Move[None]:
        """One call; Gemma 4 may leave out its first word."""
        yield from self.take_if("call")
        yield from self.expect(":")
        name, _ = yield from self.take_name("{")
        self.start_call(name)
        yield from self._object("", 1)

    def _object(self, head: str, depth: int) -> Move[None]:
        """The rest of an object whose brace is read, as JSON with `head` before it."""
        yield from self._members(head, ("{", "}"), self._member, depth)

    def _members(
        self, head: str, brackets: tuple[str, str], member: Callable[[str, int], Move[None]], depth: int
    ) -> Move[None]:
        if depth > _DEEPEST:
            raise Malformed
        opening, closing = brackets
        self.arguments(head + opening)
        head = ""
        try:
            while (yield from self.skip_space()) != closing:
                yield from member(head, depth)
                head = ", "
                yield from self.skip_space()
                if not (yield from self.take_if(",")):
                    break
            yield from self.expect(closing)
        finally:
            self.arguments(closing)

    def _member(self, head: str, depth: int) -> Move[None]:
        key = yield from self._key()
        yield from self._value(f"{head}{json.dumps(key, ensure_ascii=False)}: ", depth)

    def _key(self) -> Move[str]:
        if (yield from self.take_if(self.quote)):
            key, _ = yield from self.take_name(self.quote)
            yield from self.take_name(":")
        else:
            key, _ = yield from self.take_name(":")
        return key

    def _value(self, head: str, depth: int) -> Move[None]:
        char = yield from self.skip_space()
        if (yield from self.take_if(self.quote)):
            value, end = yield from self.take_until(self.quote, *self.marks)
            if end != self.quote:
                self.untake(end)
                raise Malformed
            self.arguments(head + json.dumps(value, ensure_ascii=False))
        elif char == "{":
            yield from self.take()
            yield from self._object(head, depth + 1)
        elif char == "[":
            yield from self.take()
            yield from self._members(head, ("[", "]"), self._value, depth + 1)
        else:
            self.arguments(head + _scalar((yield from self._bare())))

    def _bare(self) -> Move[str]:
        parts: list[str] = []
        while (char := (yield from self.peek())) not in _VALUE_END:
            if char == "<" or len(parts) > _LONGEST_WORD:
                raise Malformed
            parts.append((yield from self.take()))
        if not char:
            raise Malformed
        return "".join(parts).strip()


class Gemma4Parser(FunctionGemmaParser):
    """The same with Gemma 4's tokens, and its reasoning."""

    openings = ("<|tool_call>", "<|channel>", "<channel|>")
    closing, quote = "<tool_call|>", '<|"|>'
    marks = ("<|tool_call>", "<tool_call|>")
    begins = ("<|tool_call>",)

    @classmethod
    def reasoning_tags(cls) -> tuple[str, str]:
        return "<|channel>thought", "<channel|>"

    def block(self, opening: str) -> Move[str]:
        """A call, or thoughts, which a call ends as well: then their end comes later and says nothing."""
        if opening == "<channel|>":
            return ""
        if opening != "<|channel>":
            return (yield from super().block(opening))
        yield from self.take_if("thought")
        yield from self.take_if("\n")
        marker = yield from self.copy_until(self.reasoning, "<channel|>", *self.begins)
        return "" if marker == "<channel|>" else marker


def _scalar(word: str) -> str:
    """A JSON scalar as it is; any other word as a string."""
    try:
        value = json.loads(word, parse_constant=str)
    except (ValueError, RecursionError):
        return json.dumps(word, ensure_ascii=False)
    is_scalar = isinstance(value, bool | int | float | None)
    return word if is_scalar else json.dumps(word, ensure_ascii=False)
