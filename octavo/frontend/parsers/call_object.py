"""The JSON object that most formats call a tool with: `{"name": …, "arguments": {…}}`, keys in any order."""

import json

from octavo.frontend.parsers.scanner import Malformed, Move, Parser, drop

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")


def call_object(parser: Parser) -> Move[None]:
    """Read one object; arguments stream as they come once the name is known. Raises Malformed."""
    yield from parser.skip_space()
    yield from parser.expect("{")
    is_named, untold = False, "{}"  # untold: arguments that the events do not hold yet
    while (yield from parser.skip_space()) == '"':
        key = yield from parser.json_string()
        yield from parser.skip_space()
        yield from parser.expect(":")
        if key in _NAMES and not is_named:
            parser.start_call((yield from parser.json_string()))
            is_named = True
        elif key not in _ARGUMENTS:
            yield from parser.copy_json(drop)
        elif is_named:
            yield from arguments(parser)
            untold = ""
        else:
            parts: list[str] = []
            yield from parser.copy_json(parts.append)
            untold = _unwrapped("".join(parts))
        if (yield from parser.skip_space()) != ",":
            break
        yield from parser.take()
    yield from parser.expect("}")
    if not is_named:
        raise Malformed
    parser.arguments(untold)


def arguments(parser: Parser) -> Move[None]:
    """Arguments of the call that has begun: an object, or a string that holds one."""
    if (yield from parser.skip_space()) == '"':
        parser.arguments((yield from parser.json_string()))
    else:
        yield from parser.copy_json(parser.arguments)


def call_list(parser: Parser) -> Move[None]:
    """A JSON list of such objects. Raises Malformed."""
    yield from parser.skip_space()
    yield from parser.expect("[")
    while (yield from parser.skip_space()) == "{":
        yield from call_object(parser)
        if (yield from parser.skip_space()) != ",":
            break
        yield from parser.take()
    yield from parser.expect("]")


def _unwrapped(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        raise Malformed from None
