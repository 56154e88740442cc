r"""`Shortlist`: the few texts about which the library is asked in place of the tokens of a vocabulary.

Used by `guidance`. Tokens that no place of an output can tell apart are spelt alike, and tokens that cannot
come are left out: the library walks through some thousand texts instead of all tokens. Idea: XGrammar, whose
masks check only tokens that depend on the context.

Where a JSON text stands is known from its bytes (`Place`), and each place has a list of its own. Inside a
string, texts that are no part of a literal count by their length alone: all their characters are spelt as one
that no schema contains. For they can come only inside strings that are limited in nothing but their length
(`schema_texts` finds the others). Outside, only tokens can come that begin with what stands between strings:
blanks, punctuation, numbers, and parts of three words.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from copy import copy
from enum import IntEnum
from functools import cache, partial
from itertools import count
from threading import Lock

import llguidance
import numpy as np

from octavo.base.lru import LRU
from octavo.engine.structured.schema_texts import SchemaTexts
from octavo.messages.structured import Vocabulary

_ANY = "\U0010fffd"
"""Stands for the characters of a text that is no part of a literal."""
ANY = _ANY.encode()
_NO_TEXT = b"\xff"
"""Stands for what is no part of any text."""
_MAX_LENGTH = 32
"""Characters of such a text."""
_NUM_BYTES = 256
_NEVER, END = _NUM_BYTES, _NUM_BYTES + 1
"""Places in a list behind those of the bytes: of tokens that cannot come, and of ends of text."""
_ROUNDING = 4096
"""Sizes of lists: those of one size are asked together."""
_MANY = 8
"""A mask in which more than one in so many tokens may have changed is made token by token."""
_MAX_SHARE = 0.25
"""Of all tokens; a longer list saves nothing."""
_MAX_GROWTH = 2
"""Times the length of a list that schemas share to that of which each would need."""
_MAX_SHARED = 8
_MAX_ALPHABETS = 64
"""That are remembered."""
_IN = rb'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*'
_CUT = rb"(?:\\(?:u[0-9a-fA-F]{0,3})?)?"
_FRAGMENTS = sorted(
    {w[i:j] for w in (b"true", b"false", b"null") for j in range(1, 6) for i in range(j)} - {b""}
)
_OUT = rb"(?:[ \t\r\n\[\]{}:,0-9+\-.]|(?:E|%b)(?![A-Za-z]))*" % b"|".join(_FRAGMENTS)
_CLOSE = rb'"(?=[ \t\r\n]*(?:[:,\]}]|\Z))'
_INSIDE = re.compile(rb"%b(?:%b%b\"%b)*(?:%b|%b%b)" % (_IN, _CLOSE, _OUT, _IN, _CUT, _CLOSE, _OUT))
_OUTSIDE = re.compile(rb"%b(?:\"%b%b%b)*(?:\"%b%b)?" % (_OUT, _IN, _CLOSE, _OUT, _IN, _CUT))
"""Tokens that may come inside and outside of a string, and some more."""
_CUT_CHARACTERS = re.compile(
    rb"([\x80-\xbf]{0,3})(.*?)([\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})?", re.DOTALL
)
"""Whole characters between the end of one and the beginning of another."""
_PIECE = re.compile(rb'(")|(\\(?:u[0-9a-fA-F]{0,4}|.|\Z))|[^"\\]+', re.DOTALL)

_ANYTHING = re.compile(rb"(?:%b){1,%d}|." % (ANY, _MAX_LENGTH), re.DOTALL)


_numbers = count()


class Place(IntEnum):
    r"""Where a JSON text stands: outside of strings, in one, behind a backslash in it, behind \u, \u1, …"""

    OUTSIDE = 0
    INSIDE = 1
    ESCAPING = 2
    DIGITS = 3
    LAST_DIGIT = 6


class Steps(dict[int, int]):
    """From one place: by token, the place behind it."""

    def __init__(self, place: int, tokens: list[bytes]) -> None:
        super().__init__()
        self._place, self._tokens = place, tokens

    def __missing__(self, token_id: int) -> int:
        place = self._place
        for byte in self._tokens[token_id]:
            if place <= Place.INSIDE:
                if byte == ord('"'):
                    place = 1 - place
                elif byte == ord("\\") and place:
                    place = Place.ESCAPING
            elif place == Place.ESCAPING:
                place = Place.DIGITS if byte == ord("u") else Place.INSIDE
            else:
                place = place + 1 if place < Place.LAST_DIGIT else Place.INSIDE
        self[token_id] = int(place)
        return int(place)


class Shortlist:
    """A small vocabulary: the bytes, no token, the end of text, and what tokens are spelt like."""

    def __init__(
        self, vocabulary: Vocabulary, spellings: Iterable[bytes | None], others: Iterable[bytes] = ()
    ) -> None:
        """spellings: of each token; None for one that cannot come; others: texts of other lists."""
        self._whole = vocabulary.tokens
        self.tokens = [*(bytes([byte]) for byte in range(_NUM_BYTES)), b"<never>", b"<end>"]
        self._known: dict[bytes | None, int] = {token: i for i, token in enumerate(self.tokens[:_NEVER])}
        self._known |= {None: _NEVER, b"": _NEVER}
        self._parts = _Parts(self._known)
        spellings = [*spellings]
        for spelling in dict.fromkeys([*spellings, *others]):
            self._place_of(spelling)
        self._places = np.fromiter(map(self._known.__getitem__, spellings), np.intp, len(spellings))
        self._special = dict.fromkeys(vocabulary.special_ids, _NEVER) | dict.fromkeys(vocabulary.end_ids, END)
        self._places[[*self._special]] = [*self._special.values()]
        self._sorted, self._moved = self._places.argsort(kind="stable"), np.empty(0, np.int64)
        """Tokens by place in the list that this one was made of, and those that have others here."""
        self._bounds = np.cumsum([0, *np.bincount(self._places, minlength=len(self.tokens))])
        self.is_exact = np.zeros(len(self._whole), bool)
        """By token: it is spelt as it is, though others of its length are alike."""
        self._complete()

    def _complete(self) -> None:
        self.number = next(_numbers)
        """Unlike that of any other list."""
        self.spelt = self._places.data
        """What a token is spelt like that the last mask of this list allowed."""
        self.num_words = -(-len(self.tokens) // _ROUNDING) * _ROUNDING // 32
        padding = [b""] * (self.num_words * 32 - len(self.tokens))
        small = Vocabulary(self.tokens + padding, special_ids=[_NEVER, END], end_ids=[END])
        self.tokenizer = make_tokenizer(small, slices=[])
        self._last = np.zeros(len(self.tokens), np.uint8), np.zeros(len(self._whole), np.uint8)
        """What was allowed when a mask was widened last: of the list, and of all tokens."""

    def _place_of(self, spelling: bytes | None) -> int:
        place = self._known.setdefault(spelling, len(self.tokens))
        if place == len(self.tokens):
            assert spelling
            self.tokens.append(spelling)
        return place

    def spelling(self, is_exact: np.ndarray) -> "Shortlist":
        """Return the list in which these tokens are spelt as they are, [tokens] bool."""
        other = copy(self)
        other.tokens, other._known = self.tokens.copy(), self._known.copy()
        other._places = self._places.copy()
        other._moved = ids = np.flatnonzero(is_exact)
        other._places[ids] = [other._place_of(self._whole[i]) for i in ids.tolist()]
        other.is_exact = is_exact
        other._complete()
        return other

    @property
    def is_short(self) -> bool:
        """Return True if it saves something."""
        return len(self.tokens) <= _MAX_SHARE * len(self._whole)

    def read(self, token_id: int, chosen: "Shortlist | None") -> list[int]:
        """Return what a token is spelt like here that came in a place of the list `chosen`; None: of none."""
        if chosen is None:
            spelt, text = self._special.get(token_id, 0), self._whole[token_id]
        else:
            spelt = chosen.spelt[token_id]
            text = chosen.tokens[spelt]
        return [spelt] if chosen is self or spelt in (_NEVER, END) else self._parts[text]

    def widen(self, bits: np.ndarray) -> np.ndarray:
        """Return the mask over all tokens, [words] int32; bits: the library's, [num_words] int32.

        Called by one thread at a time. What is as it was in the last mask is copied from there.
        """
        is_allowed = np.unpackbits(bits.view(np.uint8), count=len(self.tokens), bitorder="little")
        before, allowed = self._last
        places = np.flatnonzero(is_allowed[: len(self._bounds) - 1] != before[: len(self._bounds) - 1])
        starts = self._bounds[places]
        counts = self._bounds[places + 1] - starts
        ends, size = counts.cumsum(), len(self._places)
        if counts.sum() < size // _MANY:
            changed = self._sorted[np.repeat(starts - ends + counts, counts) + np.arange(counts.sum())]
            allowed = allowed.copy()
            for token_ids in (changed, self._moved):
                allowed[token_ids] = is_allowed[self._places[token_ids]]
        else:
            allowed = is_allowed[self._places]
        self._last = is_allowed, allowed
        packed = np.zeros(-(-size // 32), np.int32)
        packed.view(np.uint8)[: -(-size // 8)] = np.packbits(allowed, bitorder="little")
        return packed


class _Parts(dict[bytes, list[int]]):
    """By text, the tokens of any list that spell it."""

    def __init__(self, known: dict[bytes | None, int]) -> None:
        """known: places in any list, by what is spelt there"""
        super().__init__()
        self._known = known

    def __missing__(self, text: bytes) -> list[int]:
        parts = [text] if text in self._known else _ANYTHING.findall(text)
        self[text] = [self._known[part] for part in parts]
        return self[text]


class JSONTokens:
    """The tokens of one vocabulary as they are spelt in a place of JSON texts."""

    def __init__(self, vocabulary: Vocabulary, place: Place) -> None:
        """Takes about half a second for 262,144 tokens."""
        self._before = b"\\" if place is Place.ESCAPING else b""
        self._ids: dict[str, list[int]] = defaultdict(list)
        """By text inside a string, the tokens in which it stands for its length alone."""
        self._is_inside = place is not Place.OUTSIDE
        spellings = map(self._by_length, count(), vocabulary.tokens)
        self._base = Shortlist(vocabulary, spellings, map(_any, range(1, _MAX_LENGTH + 1)))
        self._lock = Lock()
        self._shared: list[Shortlist] = []
        """The one that was asked for last stands first."""
        self._spelt: LRU[frozenset[str], np.ndarray] = LRU(_MAX_ALPHABETS * len(vocabulary.tokens))
        """By alphabet, the tokens of its texts."""

    def shortlist(self, texts: SchemaTexts) -> Shortlist | None:
        """Return a list for a schema, which others may have, too; None if it would be long.

        Schemas of one list share its masks, and to make one takes some milliseconds. So a list has what
        several schemas need, as long as it is not much longer than any of them needs.
        """
        if any(_ANY in text for text in texts.literals):
            return None
        with self._lock:
            needed = self._needed(texts)
            own, most = self._length(needed), _MAX_SHARE * len(needed)
            if own > most:
                return None
            near = [
                known
                for known in self._shared
                if self._length(known.is_exact | needed)
                <= min(most, _MAX_GROWTH * own, _MAX_GROWTH * len(known.tokens))
            ]
            found = min(near, key=partial(_num_missing, needed), default=self._base)
            self._shared = [known for known in self._shared if known is not found]
            if _num_missing(needed, found):
                found = self._base.spelling(found.is_exact | needed)
            self._shared = [found, *self._shared][:_MAX_SHARED]
        return found

    def _length(self, is_exact: np.ndarray) -> int:
        """Return that of a list in which these tokens are spelt as they are, at most."""
        return len(self._base.tokens) + int(np.count_nonzero(is_exact))

    def _needed(self, texts: SchemaTexts) -> np.ndarray:
        """Return what is to be spelt as it is, [tokens] bool."""
        parts = {part for text in texts.literals for part in _parts(text) if part in self._ids}
        needed = self._tokens_of(parts)
        for alphabet in filter(None, texts.alphabets):
            if (known := self._spelt.get(alphabet)) is None:
                pattern = re.compile(f"[{re.escape(''.join(sorted(alphabet)))}]*")
                known = self._tokens_of(filter(pattern.fullmatch, self._ids))
                self._spelt.put(alphabet, known, known.nbytes)
            needed |= known
        return needed

    def _tokens_of(self, texts: Iterable[str]) -> np.ndarray:
        found = np.zeros(len(self._base.is_exact), bool)
        found[[token_id for text in texts for token_id in self._ids[text]]] = True
        return found

    def _by_length(self, token_id: int, token: bytes) -> bytes | None:
        text = self._before + token
        if not (_INSIDE if self._is_inside else _OUTSIDE).fullmatch(text):
            return None
        spelling, is_inside = b"", self._is_inside
        for quote, escape, piece in (match.group(1, 2, 0) for match in _PIECE.finditer(text)):
            is_inside ^= quote is not None
            is_text = is_inside and not (quote or escape)
            spelling += self._shorten(token_id, piece) if is_text else piece
        return spelling[len(self._before) :]

    def _shorten(self, token_id: int, piece: bytes) -> bytes:
        cut = _CUT_CHARACTERS.fullmatch(piece)
        assert cut is not None
        before, whole, behind = cut.groups(b"")
        try:
            text = whole.decode()
        except UnicodeDecodeError:
            return _NO_TEXT
        if len(text) > _MAX_LENGTH or _ANY in text or "\x7f" in text:
            return piece
        self._ids[text].append(token_id)
        return before + _any(len(text)) + behind


def _num_missing(needed: np.ndarray, shortlist: Shortlist) -> int:
    return int(np.count_nonzero(needed & ~shortlist.is_exact))


@cache
def _any(length: int) -> bytes:
    return ANY * length


def _parts(text: str) -> Iterator[str]:
    for start in range(len(text)):
        for end in range(start + 1, min(start + _MAX_LENGTH, len(text)) + 1):
            yield text[start:end]


def make_tokenizer(vocabulary: Vocabulary, slices: list[str] | None = None) -> llguidance.LLTokenizer:
    """Return a vocabulary as the library has it; slices: its own short cuts, None for the usual ones."""
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Tokens(vocabulary)), eos_token=vocabulary.end_ids or None, slices=slices
    )


class _Tokens:
    """A vocabulary as the library reads it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0] if vocabulary.end_ids else None
        self._bytes = {token: i for i, token in enumerate(vocabulary.tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """Only for grammars of users who switch forcing on: byte by byte."""
        data = text.encode() if isinstance(text, str) else text
        return [self._bytes[byte] for i in range(len(data)) if (byte := data[i : i + 1]) in self._bytes]
