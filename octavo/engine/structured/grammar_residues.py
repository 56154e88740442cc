r"""`GrammarResidues`: what of a grammar in Lark may still come, so that equal cases are asked about once.

Used by `guidance` for regular expressions, choices and grammars that an `Alphabet` knows. A residue is what
remains of the lexeme that is open, which may be several parts at once, and what comes behind it (Antimirov's
partial derivatives). Where a text could be cut into lexemes in two ways, it is given up: the library's lexer
takes the longest, which residues do not say. Terms are interned: equal ones have one number.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from octavo.engine.structured.alphabet import KINDS, MEMBER, REGEX, Unclear, code_of, is_kind, pieces

_LARK = re.compile(
    r"\s+|(?://|\#)[^\n]*"
    r'|(?P<string>"(?:\\.|[^"\\\n])*")(?!i)'
    r"|/(?P<regex>(?:\\.|[^/\\\n])+)/(?![a-z])"
    r"|(?P<head>\w+)\s*:|(?P<name>\w+)"
    r"|(?P<times>[*+?]|\{\d+(?:,\d*)?\})|(?P<mark>[()|\[\]])"
)
_TIMES = {"?": (0, 1), "*": (0, None), "+": (1, None)}
_DONE = -1
"""Nothing more."""
_MAX_TERMS = 50_000
"""A grammar that makes more is given up."""
_MAX_PARTS = 64
_ASCII = 0x80

Residue = tuple[int, bytes]
"""What may come, and the beginning of a character."""
Token = tuple[str, Any]
Parts = frozenset[int]


class GrammarResidues:
    """Of the texts of one grammar."""

    def __init__(self, grammar: str) -> None:
        """Take a grammar behind its header; `begin` tells whether it is given up."""
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._terms: list[tuple[Any, ...]] = []
        self._rules: dict[str, int] = {}
        self._steps: dict[tuple[int, str], int] = {}
        try:
            self._read(grammar)
            if any(term[0] in ("times", "lexeme") and self._may_be_empty(term[1]) for term in self._terms):
                raise Unclear
            self._start = self._rest("rule", "start", behind=_DONE)
            self._is_clear = True
        except (Unclear, ValueError, KeyError, RecursionError):
            self._is_clear = False

    def begin(self) -> Residue | None:
        """Return the residue of no text; None if the grammar is given up."""
        return (self._start, b"") if self._is_clear else None

    def after(
        self, residue: Residue, counts: tuple[int, ...], text: bytes
    ) -> tuple[Residue, tuple[int, ...]] | None:
        """Return what remains once `text` has come too, which must fit; None: given up, or the end."""
        number, text = residue[0], residue[1] + text
        try:
            whole = text.decode()
        except UnicodeDecodeError as error:
            whole = text[: error.start].decode()
        try:
            for char in whole:
                if (step := (number, char)) not in self._steps:
                    self._steps[step] = self._step(*step)
                number = self._steps[step]
        except Unclear:
            return None
        except (KeyError, RecursionError):  # of a rule that is missing or begins with itself
            self._is_clear = False
            return None
        begun = text[len(whole.encode()) :]
        return None if number == _DONE or len(begun) > 3 else ((number, begun), counts)

    def _step(self, number: int, char: str) -> int:
        """Return what may come behind a character."""
        found: dict[int, set[int]] = {}
        for next_ in self._derive(number, char, {}):
            _, parts, behind = self._terms[next_]
            found.setdefault(behind, set()).update(parts)
        self._is_clear &= len(self._terms) < _MAX_TERMS
        if len(found) != 1 or not self._is_clear:
            raise Unclear
        [(behind, together)] = found.items()
        if len(together) > _MAX_PARTS:
            raise Unclear
        return behind if together == {_DONE} else self._number("in", frozenset(together), behind)

    def _derive(self, number: int, char: str, known: dict[int, Parts]) -> Parts:
        """Return what may come behind a character, by the ways in which it may be read.

        Outside of lexemes these are lexemes that are open. known: answers for this character
        """
        if number == _DONE:
            return frozenset()
        if number not in known:
            known[number] = frozenset(self._ways(number, char, known))
        return known[number]

    def _ways(self, number: int, char: str, known: dict[int, Parts]) -> Iterator[int]:
        kind, term, behind = self._terms[number]
        if kind == "in":
            parts = frozenset(next_ for part in term for next_ in self._derive(part, char, known))
            ended = self._derive(behind, char, known) if any(map(self._may_end, term)) else frozenset()
            if parts and ended:
                raise Unclear
            yield from [self._number("in", parts, behind)] if parts else ended
            return
        kind, what, *more = self._terms[term]
        if kind == "chars" and _holds(what, char):
            yield behind
        elif kind == "text" and what[more[0]] == char:
            ends = more[0] + 1 == len(what)
            yield behind if ends else self._rest("text", what, more[0] + 1, behind=behind)
        elif kind == "lexeme" and (parts := self._derive(self._number("then", what, _DONE), char, known)):
            yield self._number("in", parts, behind)
        else:
            for next_ in self._unfolded(kind, what, more, behind):
                yield from self._derive(next_, char, known)

    def _unfolded(self, kind: str, what: Any, more: list[Any], behind: int) -> Iterator[int]:
        """Return what a term that consists of others, and what comes behind it, may begin with."""
        if kind == "either":
            for option in what:
                yield self._number("then", option, behind)
        elif kind == "row":
            for part in reversed(what):
                behind = self._number("then", part, behind)
            yield behind
        elif kind == "rule":
            yield self._number("then", self._rules[what], behind)
        elif kind == "times":
            least, most = more
            is_last = most == 1
            fewer = "times", what, max(0, least - 1), most and most - 1
            yield self._number("then", what, behind if is_last else self._rest(*fewer, behind=behind))
            if not least:
                yield behind

    def _may_end(self, number: int) -> bool:
        while number != _DONE:
            _, term, number = self._terms[number]
            if not self._may_be_empty(term):
                return False
        return True

    def _may_be_empty(self, number: int) -> bool:
        kind, what, *limits = self._terms[number]
        if kind == "either":
            return any(map(self._may_be_empty, what))
        if kind == "row":
            return all(map(self._may_be_empty, what))
        if kind == "rule":
            return self._may_be_empty(self._rules[what])
        return kind == "times" and not limits[0]

    def _number(self, *term: Any) -> int:
        number = self._numbers.setdefault(term, len(self._terms))
        if number == len(self._terms):
            self._terms.append(term)
        return number

    def _rest(self, *term: Any, behind: int) -> int:
        return self._number("then", self._number(*term), behind)

    def _read(self, grammar: str) -> None:
        definitions: dict[str, list[Token]] = {}
        name = ""
        for piece in pieces(_LARK, grammar):
            if head := piece["head"]:
                if head in definitions or not (head.isupper() or head.islower()):
                    raise Unclear
                definitions[name := head] = []
            elif any(piece.values()):
                definitions[name] += self._tokens(piece, is_lexeme=name.isupper())
        for name, tokens in definitions.items():
            tokens.reverse()
            self._rules[name] = self._expression(tokens)
            if tokens:
                raise Unclear

    def _tokens(self, piece: dict[str, str | None], *, is_lexeme: bool) -> Iterator[Token]:
        mark, name, text = piece["mark"], piece["name"], piece["string"]
        if mark or piece["times"]:
            yield "mark", "(" if mark == "[" else ")" if mark == "]" else mark or piece["times"]
            if mark == "]":
                yield "mark", "?"
            return
        if name:
            number = self._number("rule", name)
            if name.islower():
                if is_lexeme:
                    raise Unclear
                is_lexeme = True
        elif text:
            number = self._number("text", json.loads(text) or _give_up(), 0)
        else:
            number = self._expression([*self._regex(piece["regex"] or "")][::-1])
        yield "term", number if is_lexeme else self._number("lexeme", number)

    def _regex(self, pattern: str) -> Iterator[Token]:
        for piece in pieces(REGEX, pattern):
            rest, unit = piece["rest"], piece["unit"]
            if rest:
                yield "mark", rest.removesuffix("?:") if rest[0] == "(" else rest
            elif unit == ".":
                yield "term", self._number("chars", (True, ((False, ((10, 10),), False),)))
            elif unit in ("^", "$"):
                raise Unclear
            else:
                members = piece["members"] or unit or ""
                is_negated = bool(piece["members"]) and members[0] == "^"
                found = (_ranges(**member) for member in pieces(MEMBER, members[is_negated:]))
                yield "term", self._number("chars", (is_negated, tuple(found)))

    def _expression(self, tokens: list[Token]) -> int:
        """Read up to the end or a closing parenthesis; tokens: backwards."""
        options: list[list[int]] = [[]]
        is_repeated = True
        while tokens:
            kind, value = tokens.pop()
            if kind == "term" or value == "(":
                options[-1].append(value if kind == "term" else self._expression(tokens))
                is_repeated = False
            elif value == ")":
                break
            elif value == "|":
                options.append([])
                is_repeated = True
            else:
                if is_repeated:
                    raise Unclear
                least, most = _TIMES.get(value) or _limits(value)
                options[-1].append(self._number("times", options[-1].pop(), least, most))
                is_repeated = True
        rows = [self._number("row", tuple(row)) if len(row) != 1 else row[0] for row in options]
        return self._number("either", tuple(rows)) if len(rows) > 1 else rows[0]


def _limits(times: str) -> tuple[int, int | None]:
    least, comma, most = times[1:-1].partition(",")
    limits = int(least), int(most or 0) or None if comma else int(least)
    if limits[1] is not None and limits[1] < max(1, limits[0]):
        raise Unclear
    return limits


def _ranges(first: str | None, last: str | None) -> tuple[bool, tuple[tuple[int, int], ...], bool]:
    """Return a member of a class: whether it is what is not in these ranges, and whether beyond ASCII too."""
    assert first
    if is_kind(first):
        return first[1].isupper(), tuple(sorted(KINDS[first[1].lower()])), True
    return False, ((code_of(first), code_of(last or first)),), False


def _holds(what: tuple[bool, tuple[tuple[bool, tuple[tuple[int, int], ...], bool], ...]], char: str) -> bool:
    is_negated, members = what
    code, found = ord(char), False
    for is_other, ranges, is_wide in members:
        if is_wide and code >= _ASCII:
            raise Unclear
        found |= is_other != any(first <= code <= last for first, last in ranges)
    return found != is_negated


def _give_up() -> str:
    raise Unclear
