"""MiniMax M3: calls as nested elements, each tag behind `]<]minimax[>[`; arguments are elements named so.

`<tool_call><invoke name="f"><city>Paris</city><days><item>1</item></days></invoke></tool_call>`.
"""

import json
from collections.abc import Mapping
from typing import Any

from octavo.frontend.parsers.scanner import Malformed, Move
from octavo.frontend.parsers.tagged import MiniMaxParser, property_of, typed, types_of

_TAG = "]<]minimax[>[<"
_DEEPEST = 32


class MiniMaxM3Parser(MiniMaxParser):
    """Text, and blocks of calls; the arguments of a call are told together."""

    opening, closing = f"{_TAG}tool_call>", f"{_TAG}/tool_call>"
    call, call_end = f"{_TAG}invoke name=", f"{_TAG}/invoke>"

    def _call(self) -> Move[None]:
        name, end = yield from self.take_until(self.name_end, _TAG)
        if end != self.name_end:
            self.untake(end)
            raise Malformed
        name = self._plain(name)
        self.start_call(name)
        members: list[tuple[str, str]] = []
        schema = self.schemas.get(name)
        try:
            while (tag := (yield from self._tag())[1]) != "/invoke":
                members.append((tag, (yield from self._element(tag, property_of(schema, tag)))))
        finally:
            self.arguments(_object(members))

    def _tag(self) -> Move[tuple[str, str]]:
        text, marker = yield from self.take_until(_TAG)
        tag, end = yield from self.take_until(">")
        if not marker or not end:
            raise Malformed
        return text, tag

    def _element(self, name: str, schema: Any, depth: int = 1) -> Move[str]:
        if name.startswith("/") or depth > _DEEPEST:
            raise Malformed
        types, parts = types_of(schema), []
        members: list[tuple[str, str]] = []
        items = schema.get("items") if isinstance(schema, Mapping) else None
        while True:
            text, tag = yield from self._tag()
            parts.append(text)
            if tag == f"/{name}":
                break
            inner = items if items is not None else property_of(schema, tag)
            members.append((tag, (yield from self._element(tag, inner, depth + 1))))
        text = "".join(parts)
        if not members and (text.strip() or not types & {"array", "object"}):
            return typed(text, types)
        if "array" in types or {tag for tag, _ in members} == {"item"}:
            return f"[{', '.join(value for _, value in members)}]"
        return _object(members)


def _object(members: list[tuple[str, str]]) -> str:
    """The members as JSON; those of one name become a list."""
    values: dict[str, list[str]] = {}
    for name, value in members:
        values.setdefault(name, []).append(value)
    written = []
    for name, given in values.items():
        value = given[0] if len(given) == 1 else f"[{', '.join(given)}]"
        written.append(f"{json.dumps(name, ensure_ascii=False)}: {value}")
    return f"{{{', '.join(written)}}}"
