"""The JSON object that most formats call a tool with: `{"name": …, "arguments": {…}}`, keys in any order."""

import json

from octavo.frontend.parsers.scanner import Malformed, Move, Parser, drop, refuse_constant

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args")


def call_object(parser: Parser, *, needs_arguments: bool = False) -> Move[None]:
    """Read one object; arguments stream as they come once the name is known. Raises Malformed."""
    yield from parser.skip_space()
    yield from parser.expect("{")
    name, is_told = "", False
    untold: list[str] = []
    while (yield from parser.skip_space()) == '"':
        key = yield from parser.json_string()
        yield from parser.skip_space()
        yield from parser.expect(":")
        if key in _NAMES and not name:
            name = yield from parser.json_string()
        elif key not in _ARGUMENTS or is_told:
            yield from parser.copy_json(drop)
        elif name:
            yield from call(parser, name)
            is_told = True
        else:
            untold = []
            yield from parser.copy_json(untold.append)
        yield from parser.skip_space()
        yield from parser.take_if(",")
    yield from parser.expect("}")
    if not is_told:
        if needs_arguments and not untold:
            raise Malformed
        told = _object("".join(untold))
        parser.start_call(name)
        parser.arguments(told)


def call(parser: Parser, name: str, call_id: str = "") -> Move[None]:
    """Read the arguments of a call: an object, or a string that holds one. Raises Malformed."""
    char = yield from parser.skip_space()
    if char == "{":
        parser.start_call(name, call_id)
        yield from parser.copy_json(parser.arguments)
    else:
        parts: list[str] = []
        yield from parser.copy_json(parts.append)
        told = _object("".join(parts))
        parser.start_call(name, call_id)
        parser.arguments(told)


def call_list(parser: Parser, *, needs_arguments: bool = False) -> Move[None]:
    """Read a JSON list of such objects. Raises Malformed."""
    num_calls = parser.num_calls
    yield from parser.skip_space()
    yield from parser.expect("[")
    while (yield from parser.skip_space()) == "{":
        yield from call_object(parser, needs_arguments=needs_arguments)
        yield from parser.skip_space()
        yield from parser.take_if(",")
    if needs_arguments and parser.num_calls == num_calls:
        raise Malformed
    yield from parser.expect("]")


def _object(text: str) -> str:
    """The JSON object that a JSON value is or holds as text; none, null and "" are an empty one."""
    value = json.loads(text or "{}")
    try:
        if isinstance(value, str):
            value = json.loads(value or "{}", strict=False, parse_constant=refuse_constant)
            text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(value, dict | None):
        raise Malformed
    return text if value else "{}"


class RequiredCallsParser(Parser):
    """The answer is a JSON list of calls: a grammar has forced it, by `tool_choice` "required"."""

    def read(self) -> Move[None]:
        yield from self.attempt(call_list(self))
        yield from self.copy_rest(self.text)


class NamedCallParser(Parser):
    """The answer is the arguments of one call: a grammar has forced it, by the name of a tool."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__()

    def read(self) -> Move[None]:
        if (yield from self.skip_space()):
            yield from self.attempt(call(self, self._name))
