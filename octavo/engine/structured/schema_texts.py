r"""What a JSON schema says about the texts inside strings: `SchemaTexts.read`.

Used by `shortlist`, which treats strings alike that are limited in nothing but their length. Here are the
exceptions: literal texts, and the characters of strings that have a pattern or a format. What is returned may
be too much, never too little; a schema that cannot be judged so is given up.
"""

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_NOTES = ("$comment", "$id", "$ref", "$schema", "default", "description", "title", "type")
"""Keywords whose texts do not appear in an output."""
_VALUES = ("const", "enum")
_OPTIONS = "x-guidance"
_FORMATS = dict.fromkeys(
    ("date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6"), string.hexdigits + "+-.:, TtZzPYMWDHSs"
)
"""The characters of each, and some more."""
_MAX_CHARACTERS = 1 << 15
"""Of all literals: tokens are looked for at each of them."""
_PIECE = re.compile(
    r"(?P<group>\(\?:|\((?!\?)|[)|])"
    r"|(?P<times>[*+?]|\{\d+(?:,\d*)?\})"
    r"|(?P<digit>\\d)"
    r"|\[(?P<members>(?:[\w .:/@,+#]|(?<=\w)-(?=\w))+-?)\]"
    r"|\\(?P<escaped>[.\-/+*?()\[\]{}|^$])"
    r"|(?P<plain>[\w :/@,#%&=~<>;-])",
    re.ASCII,
)
_RANGE = re.compile(r"(.)-(.)")


class _Unclear(Exception):
    """The schema cannot be judged."""


@dataclass(slots=True)
class SchemaTexts:
    """Of one schema."""

    literals: set[str] = field(default_factory=set)
    """Names of properties and texts of values, unescaped."""
    alphabets: set[frozenset[str]] = field(default_factory=set)
    """Characters of strings that are limited in more than their length."""

    @classmethod
    def read(cls, schema: dict[str, Any]) -> "SchemaTexts | None":
        """Return None for a schema whose strings may be anything; options for white space are not read."""
        texts = cls()
        try:
            for key, value in schema.items():
                if key != _OPTIONS:
                    texts._add(key, value, is_value=False)
        except (_Unclear, RecursionError):
            return None
        return texts if sum(map(len, texts.literals)) <= _MAX_CHARACTERS else None

    def _add(self, key: str, value: Any, *, is_value: bool) -> None:
        """Add a member of an object, which is a keyword and its value, or of the same form."""
        if key == _OPTIONS:
            raise _Unclear
        self.literals.add(key)
        if isinstance(value, str):
            if key == "pattern":
                self.alphabets.add(frozenset(_alphabet(value)))
            elif key == "format":
                self.alphabets.add(frozenset(_FORMATS.get(value) or _give_up()))
            elif key in _NOTES and not is_value:
                return
        if key == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                self.alphabets.add(frozenset(_alphabet(pattern)))
        self._visit(value, is_value=is_value or key in _VALUES)

    def _visit(self, node: Any, *, is_value: bool) -> None:
        if isinstance(node, str):
            self.literals.add(node)
        elif isinstance(node, list):
            for item in node:
                self._visit(item, is_value=is_value)
        elif isinstance(node, dict):
            for key, value in node.items():
                self._add(key, value, is_value=is_value)


def _give_up() -> str:
    raise _Unclear


def _alphabet(pattern: str) -> Iterator[str]:
    """Yield the characters of all texts that fit, for patterns of a simple kind: ^…$, no negated class."""
    if not (pattern.startswith("^") and pattern.endswith("$") and not pattern.endswith("\\$")):
        raise _Unclear
    place, depth = 1, 0
    while place < len(pattern) - 1:
        piece = _PIECE.match(pattern, place, len(pattern) - 1) or _give_up()
        assert isinstance(piece, re.Match)
        place, found = piece.end(), piece.groupdict()
        if group := found["group"]:
            depth += {"(": 1, ")": -1}.get(group[0], 0)
            if depth < 1 and group == "|":
                raise _Unclear  # ^a|b$ is bound on one side only
        yield from string.digits if found["digit"] else found["escaped"] or found["plain"] or ""
        yield from _members(found["members"] or "")


def _members(members: str) -> Iterator[str]:
    """Yield the characters of a class: [a-z_]."""
    yield from members
    for first, last in _RANGE.findall(members):
        yield from map(chr, range(ord(first), ord(last) + 1))
