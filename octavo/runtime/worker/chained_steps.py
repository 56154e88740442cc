"""Captured steps that verify drafts and guess the next ones, without the host in between.

How many drafts of the step before came true is known on the device alone. So a step's rows are laid out as if
none had, and moved here. What comes true of its own drafts is noted for the next step, and the drafter
guesses behind it in the same go: the same launches whatever comes true. Used by `CUDAGraphs`.

N = rows, one for the last token of each of R requests and one for each of its drafts, in this order; and
spare rows behind them.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.messages.step import UNTOLD
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.sampling.sampler import Kind, Masked, Sampler
from octavo.runtime.transfer import Array
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.packed_inputs import PackedInputs
from octavo.runtime.worker.prepare import ChainedRows
from octavo.runtime.worker.request_state import RequestState


@dataclass(frozen=True, slots=True)
class Chained:
    """Tokens are chosen by `kind`, drafts verified by them, and `count` tokens guessed."""

    kind: Kind
    count: int


End = Kind | Masked | Chained | None
"""How a captured step may end; None = with hidden states."""


class Links:
    """What a drafter sees of a step behind which it guesses.

    batch:  the step's, of one token in each row
    hidden: [N, any], of its tokens
    lasts:  [R] row of each request that sampled its last token
    """

    def __init__(
        self,
        batch: ForwardBatch,
        hidden: Tensor,
        lasts: Tensor,
        end: Chained,
        inputs: PackedInputs[Tensor],
        state: RequestState,
        sampler: Sampler,
    ) -> None:
        self.batch, self.hidden, self.lasts, self.end = batch, hidden, lasts, end
        self.inputs, self.state, self._sampler = inputs, state, sampler
        self._rows, self._num_wanted = inputs.rows[lasts], inputs.num_wanted[lasts]
        self._at, self._targets = inputs.output_positions[lasts] + 1, inputs.targets[lasts] + 1
        self._places, self._positions = batch.kv_lens[lasts].long() - 1, batch.positions[lasts]
        self._tables = [group.block_tables[lasts] for group in batch.groups]

    @property
    def following(self) -> Tensor:
        """Return the token behind each of the step's, [N]; arbitrary behind a draft that was wrong."""
        return self.state.token_ids.view(-1)[self.inputs.targets]

    def whole(self, cache: KVTensors) -> ForwardBatch:
        """Return the step as a batch over other layers, with the tokens behind its own."""
        batch = self.batch
        return _over(cache, batch, self.following, batch.positions, batch.kv_lens, batch.groups)

    def next(self, cache: KVTensors, number: int, token_ids: Tensor) -> ForwardBatch:
        """Return a batch of a token for each request, `number` places behind its last one that was computed.

        Requests that want no more attend to one token, and keep nothing.
        """
        is_live = self._num_wanted > number
        places = torch.where(is_live, self._places + number, 0)
        groups = [
            GroupTables(tables, _slots(tables, places, size, is_live))
            for tables, size in zip(self._tables, self.state.block_sizes, strict=True)
        ]
        positions = torch.where(is_live, self._positions + number, 0)
        return _over(cache, self.batch, token_ids, positions, places.int() + 1, groups)

    def block(self, cache: KVTensors, count: int, mask_id: int) -> ForwardBatch:
        """Return a batch of the last token of each request and `count` masks, which see each other.

        Of requests that want fewer, only so many are kept and seen.
        """
        numbers = torch.arange(count + 1, device=self.lasts.device)
        wanted = self._num_wanted.clamp(min=0)[:, None]
        is_live = ((numbers <= wanted) & (wanted > 0)).flatten()
        behind = torch.where(is_live, (self._places[:, None] + 1 + numbers).flatten(), 0)
        positions = torch.where(is_live, (self._positions[:, None] + 1 + numbers).flatten(), 0)
        lens = torch.where(wanted > 0, self._places[:, None] + 2 + wanted, 1).expand(-1, count + 1)
        ids = torch.where(numbers > 0, mask_id, self.following[self.lasts][:, None])
        groups = [
            GroupTables(many := tables.repeat_interleave(count + 1, 0), _slots(many, behind, size, is_live))
            for tables, size in zip(self._tables, self.state.block_sizes, strict=True)
        ]
        return _over(cache, self.batch, ids.flatten(), positions, lens.flatten().int(), groups)

    def choose(self, logits: Tensor, number: int, *, draws: bool) -> Tensor:
        """Choose and keep the guess `number` of each request, [R]. logits: [R, vocab_size]"""
        kind, state = self.end.kind if draws else Kind.GREEDY, self.state
        ids = self._sampler.choose(logits, self._rows, self._at + number, kind).token_ids
        ids = ids.clamp(0, self._sampler.vocab_size - 1)
        targets = torch.where(self._num_wanted > number, self._targets + number, state.spare_place)
        state.token_ids.view(-1)[targets] = ids
        return ids


Guesser = Callable[[Links], None]
"""Guesses `end.count` tokens behind a step, which `choose` keeps."""


class GuessClock:
    """Measures what guessing takes on the device; learns it when that is over, and waits for nothing."""

    def __init__(self, *, is_remote: bool) -> None:
        self._is_remote = is_remote
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._took_s = 0.0

    def measure(self, work: Callable[[], None]) -> float:
        """Do what is to be measured; return the seconds that one of the last times took, 0.0 if unknown."""
        if not self._is_remote:
            began_s = time.perf_counter()
            work()
            return time.perf_counter() - began_s
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
            began, ended = self._under_way.popleft()
            self._took_s = began.elapsed_time(ended) / 1e3
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
        began.record()
        work()
        ended.record()
        self._under_way.append((began, ended))
        return self._took_s


class ChainedSteps:
    """Begins and ends such steps over the runner's state. sampler: None in stages that choose no tokens"""

    def __init__(self, state: RequestState, sampler: Sampler | None) -> None:
        self._state, self._sampler = state, sampler
        self._clock = GuessClock(is_remote=state.token_ids.device.type != "cpu")
        self._begun: Callable[[], Links] | None = None
        """Makes what is known of the step that ended last."""

    @staticmethod
    def stage(inputs: PackedInputs[Array], rows: ChainedRows) -> None:
        """Enter what the host says of the rows; those behind them are spare."""
        count, size = len(rows.firsts), len(inputs.firsts)
        for part, given in (
            (inputs.num_known, rows.num_known),
            (inputs.drafts, rows.drafts),
            (inputs.num_taken, rows.num_taken),
            (inputs.num_wanted, rows.num_wanted),
        ):
            part[:count], part[count:] = given, -1
        inputs.firsts[:count], inputs.firsts[count:] = rows.firsts, np.arange(count, size)
        inputs.heads[: len(rows.heads)], inputs.heads[len(rows.heads) :] = rows.heads, size - 1

    def begin(self, inputs: PackedInputs[Tensor], ids: Tensor, tables: Tensor) -> None:
        """Move the rows of requests whose lengths the host did not know, and take the drafts; in place.

        ids: [N], the tokens at the rows' places; tables: [groups, N, max_blocks]
        """
        state = self._state
        moved = torch.where(inputs.num_known >= 0, state.lengths[inputs.rows] - inputs.num_known, 0)
        counted = inputs.places, inputs.positions, inputs.output_positions, inputs.targets, inputs.kv_lens
        for numbers in counted:
            numbers.add_(moved)
        kept = state.token_ids.view(-1)[inputs.places]
        ids.copy_(torch.where(inputs.drafts == UNTOLD, kept, inputs.drafts))
        places = inputs.kv_lens.long() - 1
        for group, (slots, size) in enumerate(zip(inputs.cache_slots, state.block_sizes, strict=True)):
            slots.copy_(_slots(tables[group], places, size, slots >= 0))

    def verify(self, inputs: PackedInputs[Tensor], ids: Tensor, max_logits: Tensor) -> Tensor:
        """Return the row of each request behind the drafts that came true, [R], and note its length.

        A draft is true if it is what the row before it has chosen; one whose own row has failed is given up.
        """
        state, firsts, heads = self._state, inputs.firsts, inputs.heads
        chosen = state.token_ids.view(-1)[inputs.targets]
        number = torch.arange(len(ids), device=ids.device) - firsts
        is_right = torch.where(inputs.num_taken >= 0, number <= inputs.num_taken, chosen.roll(1) == ids)
        is_draft, is_right = number > 0, is_right & (max_logits.abs() < torch.inf)
        num_wrong = (is_draft > is_right).cumsum(0)
        is_kept = is_draft & (num_wrong == num_wrong[firsts])
        kept = torch.zeros_like(firsts).index_add_(0, firsts, is_kept.long())[heads]
        state.lengths[inputs.rows[heads]] = inputs.kv_lens[heads] + kept + 1
        return heads + kept

    def end(
        self,
        inputs: PackedInputs[Tensor],
        batch: ForwardBatch,
        hidden: Tensor,
        max_logits: Tensor,
        end: Chained,
    ) -> None:
        """Verify the drafts of a step whose tokens are chosen, and leave what `guess` begins with."""
        assert self._sampler is not None
        lasts = self.verify(inputs, batch.input_ids, max_logits)
        self._begun = partial(Links, batch, hidden, lasts, end, inputs, self._state, self._sampler)

    def guess(self, guesser: Guesser) -> None:
        """Guess behind the step that ended last."""
        begun, self._begun = self._begun, None
        assert begun is not None
        guesser(begun())

    def measure(self, guess: Callable[[], None]) -> float:
        """Guess; return the seconds that this takes, 0.0 if unknown."""
        return self._clock.measure(guess)


def _over(
    cache: KVTensors,
    batch: ForwardBatch,
    input_ids: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    groups: list[GroupTables],
) -> ForwardBatch:
    """Return a batch of one token in each row over the layers of `cache`."""
    bounds = batch.cu_q_lens[: len(input_ids) + 1]
    if len(bounds) <= len(input_ids):
        bounds = torch.arange(len(input_ids) + 1, dtype=bounds.dtype, device=bounds.device)
    return ForwardBatch(
        input_ids=input_ids,
        positions=positions,
        cu_q_lens=bounds,
        kv_lens=kv_lens,
        kv_caches=cache.by_layer,
        groups=groups,
        group_of_layer=cache.group_of_layer,
        num_singles=len(input_ids),
    )


def _slots(tables: Tensor, places: Tensor, block_size: int, is_kept: Tensor) -> Tensor:
    """Return the cache slots of these places, -1 where nothing is kept. tables: [n, max_blocks]"""
    blocks = tables.gather(1, (places // block_size)[:, None])[:, 0].long()
    return torch.where(is_kept, blocks * block_size + places % block_size, -1)
