"""The chain family: what moves, verifies and prolongs rows of captured steps that verify and guess drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class ChainRows(NamedTuple):
    """The rows of a chained step, as worker/packed_inputs describes them.

    cache_slots: [groups, N]; heads: [R]; all others: [N]; int64, except that kv_lens are int32
    """

    places: Tensor
    rows: Tensor
    positions: Tensor
    cache_slots: Tensor
    output_positions: Tensor
    targets: Tensor
    kv_lens: Tensor
    num_known: Tensor
    drafts: Tensor
    num_taken: Tensor
    num_wanted: Tensor
    firsts: Tensor
    heads: Tensor


class MoveRows(Protocol):
    """Begins such a step."""

    def __call__(
        self,
        given: ChainRows,
        lengths: Tensor,
        kept_ids: Tensor,
        tables: Tensor,
        block_sizes: Sequence[int],
        ids: Tensor,
    ) -> None:
        """Move the rows of requests whose lengths the host did not know, and take the drafts; in place.

        lengths:  [rows of the batch] int64, of requests; kept_ids: [any] int64
        tables:   [groups, N, max_blocks] int32, contiguous
        ids:      [N] int64, written: the draft, or where that is UNTOLD the token kept at the row's place,
                  which becomes the draft; 0 for one that is none, -1
        """


class VerifyDrafts(Protocol):
    """Ends such a step."""

    def __call__(self, given: ChainRows, lengths: Tensor, kept_ids: Tensor, max_logits: Tensor) -> Tensor:
        """Return the row of each request behind the drafts that came true, [R] int64, and note its length.

        A draft is true if it is what the row before it has chosen; one whose own row has failed is given up.
        max_logits: [N]; a row with an infinite or NaN one has failed
        """


class Ahead(NamedTuple):
    """Where guesses stand, by their number, and the tokens as far behind the last one that was computed.

    A request that wants fewer attends to one token there, and keeps nothing.

    numbers: [count, 3 + groups, R] int64: output position of the guess, its place in the kept tokens;
             position and cache slots of the token
    kv_lens: [count, R] int32, of the token
    """

    numbers: Tensor
    kv_lens: Tensor


class LinkGuesses(Protocol):
    """Between such a step and its guesses."""

    def __call__(
        self,
        given: ChainRows,
        lasts: Tensor,
        tables: Tensor,
        block_sizes: Sequence[int],
        count: int,
        spare_place: int,
    ) -> Ahead:
        """Say where `count` guesses behind the rows `lasts`, [R], stand. tables: [groups, R, max_blocks]

        spare_place: in the kept tokens, for guesses that nobody wants
        """


class LookUp(Protocol):
    """Finds the last tokens of a sequence earlier in it."""

    def __call__(
        self, token_ids: Tensor, rows: Tensor, lengths: Tensor, least: int, most: int, count: int
    ) -> Tensor:
        """Return the `count` tokens behind the latest of the longest matches, [R, count] int64; -1 = none.

        A text that repeats itself goes on doing so.

        token_ids:   [rows of the batch, any] int64, contiguous rows; rows, lengths: [R] int64, of sequences
        least, most: tokens of a match
        """


@dataclass(frozen=True)
class ChainKernels:
    """The kernels of such steps."""

    move: MoveRows
    verify: VerifyDrafts
    link: LinkGuesses
    look_up: LookUp


def slots_of(tables: Tensor, places: Tensor, block_size: int, is_kept: Tensor) -> Tensor:
    """Return the cache slots of these places, -1 where nothing is kept. tables: [n, max_blocks]"""
    blocks = tables.gather(1, (places // block_size)[:, None])[:, 0].long()
    return torch.where(is_kept, blocks * block_size + places % block_size, -1)
