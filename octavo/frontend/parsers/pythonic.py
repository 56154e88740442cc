"""Llama 4, Gemma 3 and others: the answer is a Python list of calls, `[get_weather(city="Paris"), now()]`.

Arguments are literals, Python's or JSON's; nothing is evaluated. What models do and Python does not is read
as it is meant: line breaks and quotes within a string, numbers that begin with a zero (as text).
"""

import json
import re
from typing import Any

from octavo.frontend.parsers.marked import MarkedParser
from octavo.frontend.parsers.scanner import Malformed, Move, Parser, refuse_constant

_DEEPEST = 32
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\n": "", "\\": "\\", "'": "'", '"': '"'}
_CODES = {"x": 2, "u": 4, "U": 8}
"""Escapes by code, and how many digits these have."""
_DIGITS = re.compile(r"[+-]?0\d+")
_LONGEST_WORD = 256


class PythonicParser(Parser):
    """Calls or text, as the first character says; a call is known when its bracket closes."""

    shows_special_tokens = True

    def read(self) -> Move[None]:
        space = yield from self.take_space()
        tag = "<|python_start|>" if (yield from self.take_if("<|python_start|>")) else ""
        if (yield from self.peek()) == "[" and (yield from self.attempt(call_list(self), space + tag)):
            yield from self.skip_space()
            yield from self.take_if("<|python_end|>")
        elif not self.num_calls and (yield from self.peek()) != "[":
            self.text(space + tag)
        yield from self.copy_until(self.text, "<|eom|>", "<|eot|>")


class Lfm2Parser(MarkedParser):
    """LFM 2: the list stands between tags."""

    openings, closing = ("<|tool_call_start|>",), "<|tool_call_end|>"

    def calls(self) -> Move[None]:
        yield from call_list(self)


class Olmo3Parser(MarkedParser):
    """Olmo 3: calls on lines of their own, between tags."""

    openings, closing = ("<function_calls>",), "</function_calls>"

    def calls(self) -> Move[None]:
        while (yield from self.skip_space()) and not (yield from self.next_is(self.closing)):
            yield from call(self)


def call_list(parser: Parser) -> Move[None]:
    """Read `[f(…), g(…)]`. Raises Malformed."""
    yield from parser.expect("[")
    while (yield from parser.skip_space()) != "]":
        yield from call(parser)
        yield from parser.skip_space()
        if not (yield from parser.take_if(",")):
            break
    yield from parser.expect("]")


def call(parser: Parser) -> Move[None]:
    """Read `name(key=value, …)`. Raises Malformed."""
    name = yield from _word(parser, "._-")
    yield from parser.skip_space()
    yield from parser.expect("(")
    arguments: dict[str, Any] = {}
    while (yield from parser.skip_space()) != ")":
        key = yield from _word(parser, "_")
        yield from parser.skip_space()
        yield from parser.expect("=")
        arguments[key] = yield from _value(parser)
        yield from parser.skip_space()
        if not (yield from parser.take_if(",")):
            break
    yield from parser.expect(")")
    parser.start_call(name)
    parser.arguments(json.dumps(arguments, ensure_ascii=False))


def _word(parser: Parser, others: str) -> Move[str]:
    """Letters, digits and these others; at least one, not too many."""
    parts: list[str] = []
    while (char := (yield from parser.peek())) and (char.isalnum() or char in others):
        parts.append((yield from parser.take()))
        if len(parts) > _LONGEST_WORD:
            raise Malformed
    if not parts:
        raise Malformed
    return "".join(parts)


def _value(parser: Parser, depth: int = 0) -> Move[Any]:
    char = yield from parser.skip_space()
    if not char or depth > _DEEPEST:
        raise Malformed
    if char in "\"'":
        return (yield from _string(parser))
    if char in "[(":
        yield from parser.take()
        return (yield from _items(parser, "]" if char == "[" else ")", depth))
    if char == "{":
        yield from parser.take()
        return (yield from _braces(parser, depth))
    return _scalar((yield from _word(parser, "._+-")))


def _items(parser: Parser, closing: str, depth: int) -> Move[list[Any]]:
    items: list[Any] = []
    while (yield from parser.skip_space()) != closing:
        items.append((yield from _value(parser, depth + 1)))
        yield from parser.skip_space()
        if not (yield from parser.take_if(",")):
            break
    yield from parser.expect(closing)
    return items


def _braces(parser: Parser, depth: int) -> Move[Any]:
    members: dict[str, Any] = {}
    while (yield from parser.skip_space()) != "}":
        key = yield from _value(parser, depth + 1)
        yield from parser.skip_space()
        if not members and (yield from parser.peek()) in (",", "}"):
            yield from parser.take_if(",")
            return [key, *(yield from _items(parser, "}", depth))]
        yield from parser.expect(":")
        members[key if isinstance(key, str) else json.dumps(key)] = yield from _value(parser, depth + 1)
        yield from parser.skip_space()
        if not (yield from parser.take_if(",")):
            break
    yield from parser.expect("}")
    return members


def _string(parser: Parser) -> Move[str]:
    """A quote ends a string only where something else than text may follow."""
    quote = yield from parser.take()
    parts: list[str] = []
    while marker := (yield from parser.copy_until(parts.append, quote, "\\")):
        if marker == "\\":
            parts.append((yield from _escaped(parser)))
            continue
        space = yield from parser.take_space()
        if (yield from parser.peek()) in (",", ")", "]", "}", ":", ""):
            return "".join(parts)
        parts.append(quote + space)
    raise Malformed


def _escaped(parser: Parser) -> Move[str]:
    char = yield from parser.take()
    digits = (yield from parser.peek(_CODES[char])) if char in _CODES else ""
    if digits and re.fullmatch("[0-9a-fA-F]+", digits) and (code := int(digits, 16)) < 0x110000:
        yield from parser.take(len(digits))
        return chr(code)
    return _ESCAPES.get(char, "\\" + char)


def _scalar(word: str) -> Any:
    if word in _WORDS:
        return _WORDS[word]
    if _DIGITS.fullmatch(word):
        return word
    try:
        return json.loads(word.removeprefix("+"), parse_constant=refuse_constant)
    except ValueError:
        raise Malformed from None
