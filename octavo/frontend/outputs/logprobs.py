"""Logprobs as users see them: per position a dict of `Logprob` by token id, in a list or in `FlatLogprobs`.

Public, with vLLM's names. Made from the core's `TokenLogprobs` by the owners of open requests.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.request import TokenLogprobs


@dataclass(slots=True)
class Logprob:
    """One token's logprob at one position; rank 1 = most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""By token id: the chosen token first, then the most likely ones in order."""


class FlatLogprobs(Sequence[PositionLogprobs]):
    """The same as a list of such dicts, kept as a few arrays: 24 bytes per entry instead of some 200.

    A dict is made when a position is read. A position may be None, as in lists: the first of a prompt.
    """

    __slots__ = ("_ends", "_texts", "logprobs", "ranks", "token_ids")

    def __init__(self, positions: Iterable[PositionLogprobs | None] = ()) -> None:
        self.token_ids = array("q")
        self.logprobs = array("d")
        self.ranks = array("q")
        """0 for None."""
        self._ends = array("q")
        self._texts: dict[int, str | None] = {}
        self.extend(positions)

    @property
    def start_indices(self) -> list[int]:
        """By position: where its entries begin in the arrays."""
        return [self._start(position) for position in range(len(self))]

    @property
    def end_indices(self) -> list[int]:
        """By position: where its entries end."""
        return self._ends.tolist()

    @property
    def decoded_tokens(self) -> list[str | None]:
        """The texts of `token_ids`."""
        return [self._texts[token_id] for token_id in self.token_ids]

    def append(self, position: PositionLogprobs | None) -> None:
        """Add a position."""
        for token_id, entry in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank or 0)
            self._texts[token_id] = entry.decoded_token
        self._ends.append(len(self.token_ids))

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
        entries = range(self._start(position), self._ends[position])
        return {
            self.token_ids[i]: Logprob(
                self.logprobs[i], self.ranks[i] or None, self._texts[self.token_ids[i]]
            )
            for i in entries
        } or None

    def _part(self, start: int, stop: int) -> "FlatLogprobs":
        part, first = FlatLogprobs(), self._start(start)
        last = self._start(stop)
        for name in ("token_ids", "logprobs", "ranks"):
            setattr(part, name, getattr(self, name)[first:last])
        part._ends = array("q", [end - first for end in self._ends[start:stop]])
        part._texts = self._texts  # only ever grows
        return part


SampleLogprobs = list[PositionLogprobs] | FlatLogprobs
PromptLogprobs = list[PositionLogprobs | None] | FlatLogprobs
"""One entry per prompt token; None for the first, and for one that was cached and not computed."""


def position_logprobs(
    entry: TokenLogprobs, tokenizer: Tokenizer | None, end: int | None = None
) -> PositionLogprobs:
    """The logprobs of one position: the core's entries before `end`."""
    columns = zip(entry.token_ids[:end], entry.logprobs[:end], entry.ranks[:end], strict=True)
    return {
        token_id: Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token_id))
        for token_id, logprob, rank in columns
    }


def joined(old: SampleLogprobs | None, new: SampleLogprobs | None) -> SampleLogprobs | None:
    """Both together, in the new one's form; None when there are no new ones."""
    if not old or new is None:
        return new
    positions = [*old, *new]
    return FlatLogprobs(positions) if isinstance(new, FlatLogprobs) else positions
