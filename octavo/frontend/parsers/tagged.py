"""Calls whose arguments stand in tags of their own, one by one, as untyped text: Qwen 3 Coder and others.

Qwen 3 Coder: `<tool_call><function=f><parameter=city>Paris</parameter></function></tool_call>`. What
type a text is of, the tool's schema says; where it says nothing, what reads as JSON is JSON.
"""

import json
from collections.abc import Mapping
from typing import Any

from octavo.frontend.parsers.scanner import Malformed, Move, Parser

Schemas = Mapping[str, Mapping[str, Any] | None]
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""What templates show to models."""
_TYPES: dict[type, set[str]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


class TaggedParser(Parser):
    """Text, and blocks of calls. This one: Qwen 3 Coder, where a call may also stand outside of a block."""

    shows_special_tokens = True
    opening, closing = "<tool_call>", "</tool_call>"
    call, name_end, call_end = "<function=", ">", "</function>"
    parameter, key_end, parameter_end = "<parameter=", ">", "</parameter>"
    padding = "\n"
    """Once on either side of a text, and no part of it."""
    needs_block = False

    def __init__(self, schemas: Schemas | None = None) -> None:
        """schemas: of the arguments, by name of the tool."""
        super().__init__()
        self._schemas = schemas or {}

    def read(self) -> Move[None]:
        """The format."""
        begins = (self.opening,) if self.needs_block else (self.opening, self.call)
        while begin := (yield from self.copy_until(self.text, *begins)):
            yield from self.attempt(self._block() if begin == self.opening else self._call(), begin)

    def _block(self) -> Move[None]:
        """Its calls, at least one."""
        _, marker = yield from self.take_until(self.call, self.closing)
        if marker != self.call:
            raise Malformed
        while marker == self.call:
            yield from self._call()
            _, marker = yield from self.take_until(self.call, self.closing)

    def _call(self) -> Move[None]:
        """What follows a call's opening."""
        name, marker = yield from self._name()
        if not marker:
            raise Malformed
        self.start_call(name)
        between = "{"
        while marker == self.parameter:
            key, _ = yield from self._key()
            text, marker = yield from self.take_until(self.parameter_end, self.parameter, self.call_end)
            if not marker:
                return  # cut short
            text = text.removeprefix(self.padding).removesuffix(self.padding)
            value = _typed(text, _types(_property(self._schemas.get(name), key)))
            self.arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: {value}")
            between = ", "
            if marker == self.parameter_end:  # which models forget
                _, marker = yield from self.take_until(self.parameter, self.call_end)
        if marker:
            self.arguments("{}" if between == "{" else "}")

    def _name(self) -> Move[tuple[str, str]]:
        """The tool, and what comes next: a parameter or the call's end."""
        name, _ = yield from self.take_until(self.name_end)
        _, marker = yield from self.take_until(self.parameter, self.call_end)
        return name.strip(), marker

    def _key(self) -> Move[tuple[str, str]]:
        return (yield from self.take_until(self.key_end))


class SeedToolParser(TaggedParser):
    """Seed-OSS."""

    opening, closing = "<seed:tool_call>", "</seed:tool_call>"
    padding = ""
    needs_block = True


class MiniMaxParser(TaggedParser):
    """MiniMax M2."""

    opening, closing = "<minimax:tool_call>", "</minimax:tool_call>"
    call, name_end, call_end = '<invoke name="', '">', "</invoke>"
    parameter, key_end = '<parameter name="', '">'
    padding = ""
    needs_block = True


class Step3Parser(TaggedParser):
    """Step 3."""

    opening, closing = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
    call, name_end, call_end = '<steptml:invoke name="', '">', "</steptml:invoke>"
    parameter, key_end, parameter_end = '<steptml:parameter name="', '">', "</steptml:parameter>"
    padding = ""
    needs_block = True


class GlmParser(TaggedParser):
    """GLM 4.5 and after: `<tool_call>f<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>`."""

    parameter, key_end, value, parameter_end = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    call_end = TaggedParser.closing
    padding = ""
    needs_block = True

    def _block(self) -> Move[None]:
        """One call."""
        yield from self._call()

    def _name(self) -> Move[tuple[str, str]]:
        name, marker = yield from self.take_until(self.parameter, self.call_end)
        if not name.strip() or any(mark in name for mark in "<{["):
            raise Malformed  # another family's call
        return name.strip(), marker

    def _key(self) -> Move[tuple[str, str]]:
        key = yield from self.take_until(self.key_end)
        yield from self.take_until(self.value)
        return key


def _property(schema: Mapping[str, Any] | None, key: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def _types(schema: Any) -> set[str]:
    """Names of the types that a schema allows; none: it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    stated = schema.get("type", [])
    types = {stated} if isinstance(stated, str) else {name for name in stated if isinstance(name, str)}
    for value in schema.get("enum", ()) if not types else ():
        types |= _TYPES[type(value)]
    for choices in (schema.get("anyOf", ()), schema.get("oneOf", ())):
        types = types.union(*map(_types, choices))
    return types


def _typed(text: str, types: set[str]) -> str:
    """The text as JSON."""
    word = _PYTHON.get(text.strip(), text)
    try:
        value = json.loads(word, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    is_text = "string" in types and not _TYPES[type(value)] & types - {"string"}
    return json.dumps(text, ensure_ascii=False) if is_text else word.strip()


def _no_constant(name: str) -> Any:
    raise ValueError(name)
