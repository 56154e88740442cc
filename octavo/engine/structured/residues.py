r"""`Residues`: what of a JSON text decides how it goes on, so that equal cases are asked about once.

Used by `guidance`. A value that is complete counts no longer: of an array only the number of values does, of
an object the names. Where a string is limited in nothing but its length, its characters are counted; digits
of integers that leave the same rest are one. All else that is open counts as it stands. This holds for
schemas that say nothing of several values at once (no allOf, uniqueItems, …): objects and arrays of others
are given up. Residues may tell apart what is alike, never the other way round.
"""

import json
import re
from typing import Any

from octavo.engine.structured.lark import MAX_INDENT, WHITE_SPACE
from octavo.engine.structured.shortlist import ANY

_BLANKS = b" \t\r\n"
_LEXEME = re.compile(
    rb'[ \t\r\n]*(?:([{}\[\],:])|("(?:[^"\\]|\\.)*")|[^ \t\r\n{}\[\],:"]+(?=[ \t\r\n,\]}]))', re.DOTALL
)
_CHARACTER = re.compile(
    rb'[\x01 !#-\[\]-~]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})'
    rb"|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}"
)
_ONE_MORE = re.compile(rb"(?:[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]|[\xf0-\xf4][\x80-\xbf]{2})\Z")
_TWO_MORE = re.compile(rb"(?:[\xe1-\xec\xee\xef]|[\xf0-\xf4][\x80-\xbf])\Z")
"""Beginnings of characters that any such byte ends."""
_CHARACTERS = re.compile(b'"((?:%b)*)' % _CHARACTER.pattern)
_NOTES = {"$comment", "$defs", "$schema", "default", "definitions", "description", "title", "x-guidance"}
_WORDS = {
    "object": {"type", "properties", "required", "additionalProperties"},
    "array": {"type", "items", "minItems", "maxItems"},
    "string": {"type", "minLength", "maxLength"},
    "integer": {"type", "minimum", "maximum"},
}
"""Keywords of the schemas that are understood."""
_NULL = {"type": "null"}
_MAX_DEPTH, _MAX_TEXT = 64, 1000
_VALUE, _NAME, _COLON, _COMMA = range(4)
"""What comes next in the innermost container that is open."""

Residue = tuple[Any, int, bytes]
"""That container (the one around it, its schema, what counts of it, its depth), what comes next there, and
what is open of a value or a name, or blanks."""
Counts = tuple[int, ...]
"""Blanks at the beginning of the line that was begun last; commas so far in each array that is open."""


def most_blanks(tokens: list[bytes]) -> int:
    """Return how many blanks a token may begin with."""
    return max(len(token) - len(token.lstrip(b" \t")) for token in tokens)


def most_items(tokens: list[bytes]) -> int:
    """Return how many values one token may end, at most."""
    return 2 + max(len(re.findall(rb",\s*[^,\s]", token)) for token in [b",", *tokens] if b"," in token)


class Residues:
    """Of the texts of one schema."""

    def __init__(self, schema: dict[str, Any], reach: int, indent: int) -> None:
        """Take how many values and blanks a token may bring: what is farther from a limit is alike."""
        self._root, self._reach = schema, reach
        self._far = MAX_INDENT - indent
        own = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
        self._has_lines = own.get("whitespace_pattern") == WHITE_SPACE
        self._numbers: dict[int, int] = {}
        self._schemas: list[tuple[str, dict[str, Any]]] = []
        """By number: a kind of _WORDS, or none, and the schema."""
        self._same: dict[tuple[int, ...], bytes] = {}
        """By schema and what may follow: digits of an integer."""

    def begin(self) -> Residue | None:
        """Return the residue of no text; None if the schema is given up."""
        return (None, _VALUE, b"") if self._kind(self._number(self._root)) in ("object", "array") else None

    def after(self, residue: Residue, counts: Counts, text: bytes) -> tuple[Residue, Counts] | None:
        """Return what remains once `text` has come too, which must fit; None: given up, or the end.

        Without a change in `counts`, which then is the same object, the residue is right for any counts.
        """
        around, due, rest = residue
        if self._has_lines and rest[:1] == b"\n":
            rest = b"\n" + b" " * counts[0]
        rest += text.replace(ANY, b"\x01")
        while lexeme := _LEXEME.match(rest):
            mark, string = lexeme.groups()
            rest = rest[lexeme.end() :]
            if mark in (b"{", b"["):
                around, due, counts = self._open(around, counts, mark)
            elif around is not None and due == _NAME and string:
                outer, number, names, depth = around
                around, due = (outer, number, (*names, string), depth), _COLON
            elif around is not None and mark == b",":
                is_array = self._kind(around[1]) == "array"
                counts = (*counts[:-1], counts[-1] + 1) if is_array else counts
                around, due = self._limited(around, counts) if is_array else around, _NAME - is_array
            elif around is not None and mark in (b"]", b"}"):
                counts = counts[:-1] if mark == b"]" else counts
                around, due = around[0], _COMMA
            else:
                due = _VALUE if mark else _COMMA
            if around is None:
                return None
        if begun := rest.lstrip(_BLANKS):
            if around is None:
                return None  # the text may end with what ends this value
            rest = self._shorten(self._value(around), begun) if due == _VALUE else begun
        elif rest and self._has_lines:
            rest = rest.replace(b"\r\n", b"\n").replace(b"\t", b" ")
            if rest[:1] == b"\n":
                counts = (len(rest) - 1, *counts[1:])
                rest = b"\n" + b" " * (counts[0] - self._far)
        is_short = len(rest) + (len(around[2]) if around else 0) < _MAX_TEXT
        return ((around, due, rest), counts) if is_short else None

    def _open(self, around: Any, counts: Counts, mark: bytes) -> tuple[Any, int, Counts]:
        number, depth = self._value(around), around[3] + 1 if around else 0
        inside = around, number, (), depth
        if depth > _MAX_DEPTH or self._kind(number) != ("array" if mark == b"[" else "object"):
            return None, _VALUE, counts
        if mark == b"{":
            return inside, _NAME, counts
        return self._limited(inside, counts := (*counts, 0)), _VALUE, counts

    def _limited(self, around: Any, counts: Counts) -> Any:
        """Return an array with what the last count leaves of its limits, as far as a token reaches."""
        outer, number, _, depth = around
        schema, count = self._schemas[number][1], counts[-1]
        least, most = schema.get("minItems", 0) - count, schema.get("maxItems")
        return (
            outer,
            number,
            (count > 0, min(max(0, least), self._reach), most and min(most - count, self._reach)),
            depth,
        )

    def _value(self, around: Any) -> int:
        """Return the schema of the value that comes next in a container."""
        if around is None:
            return self._number(self._root)
        _, number, seen, _ = around
        kind, schema = self._schemas[number]
        if kind == "array":
            return self._number(schema.get("items"))
        name = _read(seen[-1]) if seen else ""
        return self._number(schema["properties"].get(name, schema.get("additionalProperties")))

    def _shorten(self, number: int, text: bytes) -> bytes:
        """Return a text that is open, or another that may go on in the same ways."""
        kind, schema = self._schemas[number]
        least, most = schema.get("minimum"), schema.get("maximum")
        if kind == "string" and (whole := _CHARACTERS.match(text)):
            count, rest = len(_CHARACTER.findall(whole[1])), text[whole.end() :]
            most = count if "maxLength" in schema or rest else schema.get("minLength", 0)
            rest = _TWO_MORE.sub(b"\xe1", _ONE_MORE.sub(b"\xc3", rest))
            return b'"' + b"." * min(count, most) + rest
        if kind == "integer" and least is None and most is None:
            return re.sub(rb"[1-9]\d*", b"1", text)
        if kind == "integer" and text.isdigit() and text[:1] != b"0" and most is not None:
            return self._same.setdefault((number, *_ranges(int(text), least or 0, most)), text)
        return text

    def _kind(self, number: int) -> str:
        return self._schemas[number][0]

    def _number(self, schema: Any) -> int:
        number = self._numbers.setdefault(id(schema), len(self._schemas))
        if number == len(self._schemas):
            self._schemas.append(self._judge(schema))
        return number

    def _judge(self, schema: Any) -> tuple[str, dict[str, Any]]:
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict):
                break
            words, options = schema.keys() - _NOTES, schema.get("anyOf")
            if words == {"$ref"}:
                found: Any = self._root
                for part in schema["$ref"].removeprefix("#/").split("/"):
                    found = found.get(part) if isinstance(found, dict) else None
                schema = found
            elif words == {"anyOf"} and isinstance(options, list) and len(options) == 2 and _NULL in options:
                schema = options[options.index(_NULL) - 1]  # told by the first letter
            else:
                kind = str(schema.get("type"))
                limits = (schema[word] for word in words if word.startswith(("min", "max")))
                is_known = words <= _WORDS.get(kind, set()) and all(type(limit) is int for limit in limits)
                return (
                    (kind, schema) if is_known and (kind != "object" or "properties" in schema) else ("", {})
                )
        return "", {}


def _read(name: bytes) -> str:
    """Return what a JSON string says; of one that may not come, nothing."""
    try:
        return str(json.loads(name.decode(errors="replace"), strict=False))
    except ValueError:
        return ""


def _ranges(value: int, least: int, most: int) -> list[int]:
    """Return, for each number of further digits, which of them make an integer between two others."""
    found, scale = [], 1
    while value * scale <= most:
        found += [max(least - value * scale, 0), min(most - value * scale, scale - 1)]
        scale *= 10
    return found
