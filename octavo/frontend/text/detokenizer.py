"""`Detokenizer`: token ids of one growing sequence to text, piece by piece.

Called by the output processor. The pieces joined are the whole text whatever the split, because a token's
bytes do not depend on its neighbours and UTF-8 is decoded incrementally: an unfinished character waits for
its other bytes, and U+FFFD stands only for bytes that can no longer become a character. Work and memory per
token are constant.
"""

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence

from octavo.frontend.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one sequence. `context`: the ids before it (its prompt), which are not shown again."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._packed = frozenset[int]() if spaces_between_special_tokens else tokenizer.special_ids
        self._unfinished = b""
        """The beginning of a character."""
        self._at_start = True
        self._after_packed = False
        self._num_owed = 0
        """Bytes of a character that the prompt began: if it never becomes one, it is not ours to show."""
        self.feed(context[-_LONGEST_CHARACTER:])
        self._num_owed = len(self._unfinished)
        self._at_start = self._at_start and not context

    def feed(self, ids: Iterable[int]) -> str:
        """The text that `ids` add."""
        added: Iterable[bytes]
        if self._at_start or self._packed:
            added = map(self._piece, ids)
        else:
            pieces, hidden = self._tokenizer.pieces, self._hidden
            added = (pieces[token_id] for token_id in ids if token_id not in hidden)
        data = self._unfinished + b"".join(added)
        text, num_used = utf_8_decode(data, "replace", False)
        self._unfinished = data[num_used:] if num_used < len(data) else b""
        if self._num_owed and text:
            self._num_owed = 0
            if not data.startswith(_REPLACEMENT.encode()):
                text = text.removeprefix(_REPLACEMENT)
        return text

    def finish(self) -> str:
        """What remains at the end: U+FFFD for a character that was never finished, else nothing."""
        data, self._unfinished = self._unfinished, b""
        if len(data) == self._num_owed:
            return ""
        return data.decode(errors="replace")

    def _piece(self, token_id: int) -> bytes:
        """What a token adds where that depends on those before it."""
        if token_id in self._hidden:
            return b""
        piece = self._tokenizer.token_bytes(token_id, first=self._at_start)
        packed = token_id in self._packed
        if packed and self._after_packed:
            piece = piece.removeprefix(b" ")
        self._at_start, self._after_packed = False, packed
        return piece
