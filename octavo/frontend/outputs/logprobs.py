"""Logprobs as users see them: per position a dict of `Logprob` by token id, in a list or in `FlatLogprobs`.

Public, with vLLM's names. Made from the core's `TokenLogprobs` by the owners of open requests.
"""

from array import array
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from typing import Any, overload

import msgspec

from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.request import TokenLogprobs

_LONGEST_CHARACTER = 4
"""Bytes in UTF-8."""
_MANY = 1000
"""Entries of a position, such as the whole vocabulary; as objects those of 80 positions would take 1 GB."""


class Logprob(msgspec.Struct, gc=False):
    """One token's logprob at one position; rank 1 = most likely.

    Millions of them may be kept; the garbage collector need not look at any (`gc=False`), nor at their dicts.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""By token id: the chosen token first, then the most likely ones in order."""


class FlatLogprobs(Sequence[PositionLogprobs]):
    """The same as a list of such dicts, kept as a few arrays: 32 bytes per entry instead of some 180.

    A dict is made when a position is read; the last one is kept. A position may be None, as in lists: the
    first of a prompt.
    """

    __slots__ = ("_ends", "_ids", "_logprobs", "_ranks", "_read", "_texts")

    def __init__(self, positions: Iterable[PositionLogprobs | None] = ()) -> None:
        self._ids = array("q")
        self._logprobs = array("d")
        self._ranks = array("q")
        """0 for None."""
        self._texts: list[str | None] = []
        self._ends = array("q")
        self._read: tuple[int, PositionLogprobs | None] = (-1, None)
        self.extend(positions)

    @property
    def start_indices(self) -> list[int]:
        """Return by position where its entries begin in the columns."""
        return [self._start(position) for position in range(len(self))]

    @property
    def end_indices(self) -> list[int]:
        """Return by position where its entries end."""
        return self._ends.tolist()

    @property
    def token_ids(self) -> list[int]:
        """Return the tokens of all entries."""
        return self._ids.tolist()

    @property
    def logprobs(self) -> list[float]:
        """Return the logprobs of `token_ids`."""
        return self._logprobs.tolist()

    @property
    def ranks(self) -> list[int | None]:
        """Return the ranks of `token_ids`."""
        return [rank or None for rank in self._ranks]

    @property
    def decoded_tokens(self) -> list[str | None]:
        """Return the texts of `token_ids`."""
        return list(self._texts)

    def append(self, position: PositionLogprobs | None) -> None:
        """Add a position."""
        entries = (position or {}).values()
        self.append_columns(
            [*(position or ())],
            [entry.logprob for entry in entries],
            [entry.rank or 0 for entry in entries],
            [entry.decoded_token for entry in entries],
        )

    def append_columns(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Sequence[int],
        texts: Sequence[str | None],
    ) -> None:
        """Add a position of these entries; a rank of 0 stands for None."""
        self._ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._ranks.extend(ranks)
        self._texts.extend(texts)
        self._ends.append(len(self._ids))

    def extend(self, positions: Iterable[PositionLogprobs | None]) -> None:
        """Add several positions."""
        for position in positions:
            self.append(position)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...
    def __getitem__(self, index: int | slice) -> Any:
        positions = range(len(self))[index]
        if isinstance(positions, int):
            return self._position(positions)
        if positions.step != 1:
            return FlatLogprobs(self._position(position) for position in positions)
        return self._part(positions.start, max(positions.start, positions.stop))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"FlatLogprobs({list(self)!r})"

    def _start(self, position: int) -> int:
        return self._ends[position - 1] if position else 0

    def _position(self, position: int) -> PositionLogprobs | None:
        if self._read[0] != position:
            part = slice(self._start(position), self._ends[position])
            ranks = (rank or None for rank in self._ranks[part])
            entries = map(Logprob, self._logprobs[part], ranks, self._texts[part])
            self._read = position, dict(zip(self._ids[part], entries, strict=True)) or None
        return self._read[1]

    def _part(self, start: int, stop: int) -> "FlatLogprobs":
        part, first = FlatLogprobs(), self._start(start)
        last = self._start(stop)
        for name in ("_ids", "_logprobs", "_ranks", "_texts"):
            setattr(part, name, getattr(self, name)[first:last])
        part._ends = array("q", [end - first for end in self._ends[start:stop]])
        return part


def kept_logprobs(count: int, *, flat: bool) -> Any:
    """Return what positions of `count` entries are added to: with very many, arrays in any case."""
    return FlatLogprobs() if flat or count > _MANY else []


SampleLogprobs = list[PositionLogprobs] | FlatLogprobs
PromptLogprobs = list[PositionLogprobs | None] | FlatLogprobs
"""One entry per prompt token; None for the first, and for one that was cached and not computed."""


class LogprobSpeller:
    """Turns the core's entries into what users see, one position after the other.

    A character whose bytes stand in several tokens is shown with the token that completes it; the tokens
    before it show no text, as in vLLM.
    """

    def __init__(self, tokenizer: Tokenizer | None, context: Sequence[int] = ()) -> None:
        """context: ids of the tokens before the first position."""
        self._tokenizer = tokenizer
        self._unfinished = b""
        """The beginning of a character."""
        for token_id in context[-_LONGEST_CHARACTER:]:
            self._take(token_id)

    def append(self, positions: Any, entry: TokenLogprobs, end: int | None = None) -> None:
        """Add the next position: the entries before `end`, its own token first; None if there are none.

        positions: SampleLogprobs or PromptLogprobs
        """
        ids, logprobs, ranks = entry.token_ids[:end], entry.logprobs[:end], entry.ranks[:end]
        texts = self._texts(ids)
        if isinstance(positions, FlatLogprobs):
            positions.append_columns(ids, logprobs, ranks, texts)
        else:
            positions.append(dict(zip(ids, map(Logprob, logprobs, ranks, texts), strict=True)) or None)

    def _texts(self, token_ids: list[int]) -> list[str | None]:
        """Return the texts of the tokens that may stand here; the first is the one that does."""
        if self._tokenizer is None:
            return [None] * len(token_ids)
        before = self._unfinished
        if token_ids:
            self._take(token_ids[0])
        else:  # cached and not computed: what stands here is not known
            self._unfinished = b""
        if before:
            return [self._tokenizer.text_after(before, token_id) for token_id in token_ids]
        return list(map(self._tokenizer.token_texts.__getitem__, token_ids))

    def _take(self, token_id: int) -> None:
        if self._tokenizer is not None:
            data = self._unfinished + self._tokenizer.pieces[token_id]
            self._unfinished = data[utf_8_decode(data, "replace", False)[1] :]


def joined(old: SampleLogprobs | None, new: SampleLogprobs | None) -> SampleLogprobs | None:
    """Both together, in the new one's form; None when there are no new ones."""
    if not old or new is None:
        return new
    positions = [*old, *new]
    return FlatLogprobs(positions) if isinstance(new, FlatLogprobs) else positions
