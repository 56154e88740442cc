"""Llama 4, Gemma 3 and others: the answer is a Python list of calls, `[get_weather(city="Paris"), now()]`."""

import ast
import json
from typing import Any

from octavo.frontend.parsers.scanner import Malformed, Move, Parser

_LONGEST_CALL = 65_536
"""Characters; Python's own parser reads them."""


class PythonicParser(Parser):
    """Calls or text, as the first character says; a call is known when its bracket closes."""

    shows_special_tokens = True

    def read(self) -> Move[None]:
        """The format."""
        opening = ""
        if (yield from self.skip_space()) == "<":
            opening = yield from self._tag("<|python_start|>")
        if (yield from self.peek()) == "[" and (yield from self.attempt(self._calls(), opening)):
            opening = ""
            yield from self.skip_space()
            yield from self._tag("<|python_end|>")
        elif opening:
            self.text(opening)
        yield from self.copy_until(self.text, "<|eom|>", "<|eot|>")

    def _tag(self, tag: str) -> Move[str]:
        return (yield from self.take(len(tag))) if (yield from self.peek(len(tag))) == tag else ""

    def _calls(self) -> Move[None]:
        yield from self.expect("[")
        while True:
            yield from self.skip_space()
            name, arguments = _parsed((yield from self._one_call()))
            self.start_call(name)
            self.arguments(arguments)
            if (yield from self.skip_space()) != ",":
                break
            yield from self.take()
        yield from self.expect("]")

    def _one_call(self) -> Move[str]:
        """The text of `name(…)`, to the bracket that closes it."""
        parts: list[str] = []
        depth, quote = 0, ""
        while char := (yield from self.take()):
            parts.append(char)
            if quote:
                if char == "\\":
                    parts.append((yield from self.take()))
                elif char == quote:
                    quote = ""
            elif char in "\"'":
                quote = char
            elif char in "([{":
                depth += 1
            elif char in ")]}":
                depth -= 1
                if depth <= 0:
                    return "".join(parts)
            if len(parts) > _LONGEST_CALL:
                raise Malformed
        raise Malformed


class Lfm2Parser(PythonicParser):
    """LFM 2: the list stands between tags."""

    def read(self) -> Move[None]:
        """The format."""
        opening, closing = "<|tool_call_start|>", "<|tool_call_end|>"
        while (yield from self.copy_until(self.text, opening)):
            yield from self.skip_space()
            if (yield from self.attempt(self._calls(), opening)):
                yield from self.take_until(closing)


def _parsed(text: str) -> tuple[str, str]:
    """Name and JSON arguments of one call of literals."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise Malformed
        values: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise Malformed
            values[keyword.arg] = _literal(keyword.value)
        return ast.unparse(call.func), json.dumps(values, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


def _literal(node: ast.expr) -> Any:
    """A literal; also `true`, `false` and `null`, which models write."""
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "null": None}[node.id] if node.id in _JSON_NAMES else _refuse()
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            ast.literal_eval(key) if key else _refuse(): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
        }
    return ast.literal_eval(node)


_JSON_NAMES = ("true", "false", "null")


def _refuse() -> Any:
    raise Malformed
