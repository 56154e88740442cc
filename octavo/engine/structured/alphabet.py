r"""`Alphabet`: which characters a grammar can tell apart, read from its text.

Used by `guidance` for regular expressions, choices and grammars in Lark: tokens whose characters are
alike one by one are spelt alike in a `shortlist`. Characters may be told apart that are alike, never the
other way round; a grammar that cannot be judged so is given up.
"""

import json
import re
from collections.abc import Iterator

import numpy as np

from octavo.engine.structured.shortlist import Shortlist
from octavo.messages.structured import Vocabulary

_LARK = re.compile(
    r"(?P<note>(?://|\#)[^\n]*)"
    r'|(?P<string>"(?:\\.|[^"\\\n])*")(?!i)'
    r"|/(?P<regex>(?:\\.|[^/\\\n])+)/s?(?![a-z])"
    r"|(?P<rest>%ignore\b|[\w\s:|()?*+!,{}\[\]-]|\.(?!\.))"
)
_UNIT = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^a-zA-Z0-9]|\\[nrtfvdwsDWS]"
REGEX = re.compile(
    r"(?P<rest>\((?:\?:)?(?!\?)|[)|]|[*+?]|\{\d+(?:,\d*)?\})"
    rf"|\[(?P<members>\^?(?:{_UNIT}|[^\\\[\]])+)\]"
    rf"|(?P<unit>{_UNIT}|[^\\\[\](){{}}])"
)
MEMBER = re.compile(rf"(?P<first>{_UNIT}|.)(?:-(?P<last>{_UNIT}|.))?", re.DOTALL)
_SETS = re.compile(r"&&|--|~~")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
KINDS = {
    "d": {(0x30, 0x39)},
    "w": {(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)},
    "s": {(code, code) for code in (*range(0x09, 0x0E), 0x20)},
}
"""Their ranges of ASCII."""
_ASCII = 0x80
_END, _OTHER = "\U0010ffff", "\U0010fffe"
"""Stand between texts, and for what can come nowhere; they are no characters."""
_MAX_RANGES = 4000


class Unclear(Exception):
    """The grammar cannot be judged."""


class Alphabet:
    """Of one grammar."""

    def __init__(self) -> None:
        self.ranges: set[tuple[int, int]] = {(ord(_END), ord(_END))}
        """First and last code points of characters that are alike unless a border of another runs between."""
        self.is_open = False
        """Some place takes characters that are named nowhere."""
        self.is_unicode = False
        """All characters beyond ASCII are told apart."""

    @classmethod
    def read(cls, grammar: str) -> "Alphabet | None":
        """Return None for a grammar that cannot be judged; its header is not read."""
        alphabet = cls()
        try:
            for piece in pieces(_LARK, grammar.partition("\n")[2]):
                if piece["string"]:
                    alphabet._add_text(json.loads(piece["string"]))
                elif piece["regex"]:
                    alphabet._add_regex(piece["regex"])
        except (Unclear, ValueError):
            return None
        return alphabet

    def _add_text(self, text: str) -> None:
        self.ranges |= {(ord(char), ord(char)) for char in text}

    def _add_regex(self, pattern: str) -> None:
        for piece in pieces(REGEX, pattern):
            if members := piece["members"]:
                if _SETS.search(members):
                    raise Unclear
                self.is_open |= members[0] == "^"
                for member in pieces(MEMBER, members.removeprefix("^")):
                    self._add_range(member["first"], member["last"] or member["first"])
            elif piece["unit"] == ".":
                self.is_open = True
                self._add_text("\n")
            elif unit := piece["unit"]:
                self._add_range(unit, unit)

    def _add_range(self, first: str | None, last: str | None) -> None:
        assert first and last
        if is_kind(first) or is_kind(last):
            if first != last:
                raise Unclear
            self.is_open |= first[1].isupper()
            self.is_unicode = True
            self.ranges |= KINDS[first[1].lower()]
        else:
            self.ranges.add((code_of(first), code_of(last)))


class Alphabets:
    """The tokens of one vocabulary, as grammars of small alphabets spell them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        texts = [_decode(token) for token in vocabulary.tokens]
        self._ids = [token_id for token_id, text in enumerate(texts) if text]
        """Of tokens that are whole characters."""
        joined = _END.join(filter(None, texts))
        self._codes = np.frombuffer(joined.encode("utf-32-le"), np.uint32)

    def shortlist(self, alphabet: Alphabet) -> Shortlist | None:
        """Return the list for a grammar; None if it would be long."""
        if len(alphabet.ranges) > _MAX_RANGES:
            return None
        firsts, lasts = (np.sort(codes) for codes in np.array([*alphabet.ranges], np.uint32).T)
        borders = np.unique(np.concatenate([[0, 0xE000], firsts, lasts + 1])).astype(np.uint32)
        is_named = firsts.searchsorted(borders, "right") > lasts.searchsorted(borders, "left")
        unnamed = borders[~is_named & (borders >= ord(" ")) & ((borders < 0xD800) | (borders >= 0xE000))]
        alike = np.where(is_named, borders, unnamed[0] if alphabet.is_open else ord(_OTHER))
        codes = alike.astype(np.uint32)[borders.searchsorted(self._codes, "right") - 1]
        if alphabet.is_unicode:
            codes = np.where(self._codes < _ASCII, codes, self._codes)
        texts = codes.tobytes().decode("utf-32-le").split(_END)
        known = {text: None if _OTHER in text else text.encode() for text in set(texts)}
        spellings: list[bytes | None] = [*self._vocabulary.tokens]
        for token_id, text in zip(self._ids, texts, strict=True):
            spellings[token_id] = known[text]
        shortlist = Shortlist(self._vocabulary, spellings)
        return shortlist if shortlist.is_short else None


def _decode(token: bytes) -> str:
    """Return the text of a token; none if it is no whole characters."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return ""
    return "" if _END in text or _OTHER in text else text


def is_kind(unit: str) -> bool:
    """Return True for one that stands for several characters."""
    return unit[0] == "\\" and unit[1:] in "dwsDWS"


def pieces(pattern: re.Pattern[str], text: str) -> Iterator[dict[str, str | None]]:
    """Yield the groups of a text, which is nothing but pieces; else it is Unclear."""
    place = 0
    while place < len(text):
        piece = pattern.match(text, place)
        if piece is None:
            raise Unclear
        place = piece.end()
        yield piece.groupdict()


def code_of(unit: str) -> int:
    """Return the character that one stands for."""
    if unit[0] != "\\":
        return ord(unit)
    return int(unit[2:], 16) if unit[1] in "xu" and len(unit) > 2 else ord(_CONTROLS.get(unit[1], unit[1]))
