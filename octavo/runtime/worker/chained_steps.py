"""Captured steps that verify drafts and guess the next ones, without the host in between.

How many drafts of the step before came true is known on the device alone. So a step's rows are laid out as if
none had, and moved here. What comes true of its own drafts is noted for the next step, and the drafter
guesses behind it in the same go: the same launches whatever comes true. Used by `CUDAGraphs`.

N = rows, one for the last token of each of R requests and one for each of its drafts, in this order; and
spare rows behind them.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.kernels.chained import ChainKernels, ChainRows, slots_of
from octavo.runtime.sampling.sampler import Kind, Masked, Sampler
from octavo.runtime.transfer import Array
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.packed_inputs import PackedInputs
from octavo.runtime.worker.prepare import ChainedRows
from octavo.runtime.worker.request_state import RequestState

_MEASURED = 4
"""Times that guesses of a shape are measured, in a capture of their own."""


@dataclass(frozen=True, slots=True)
class Chained:
    """Tokens are chosen by `kind`, drafts verified by them, and `count` tokens guessed.

    at_once: in the same capture; otherwise in one of its own, whose time is measured
    """

    kind: Kind
    count: int
    at_once: bool = False

    def in_one(self) -> "Chained":
        """Return the same with the guesses in the same capture."""
        return replace(self, at_once=True)


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
        steps: "ChainedSteps",
    ) -> None:
        self.batch, self.hidden, self.lasts, self.end = batch, hidden, lasts, end
        assert steps.sampler is not None
        self.inputs, self.state = inputs, steps.state
        self.kernels, self._sampler = steps.kernels, steps.sampler
        self.rows, self._tables = inputs.rows[lasts], steps.tables[:, lasts]
        sizes, spare_place = steps.state.block_sizes, steps.state.spare_place
        self._ahead = steps.kernels.link(
            _rows_of(inputs), lasts, self._tables, sizes, end.count + 1, spare_place
        )

    @property
    def following(self) -> Tensor:
        """Return the token behind each of the step's, [N]; arbitrary behind a draft that was wrong."""
        return self.state.token_ids.view(-1)[self.inputs.targets]

    def whole(self, cache: KVTensors) -> ForwardBatch:
        """Return the step as a batch over other layers, with the tokens behind its own."""
        batch = self.batch
        return _over(cache, batch, self.following, batch.positions, batch.kv_lens, batch.groups)

    def ahead(self, cache: KVTensors) -> ForwardBatch:
        """Return a batch of the tokens behind the step's; keep nothing of requests that want no guesses."""
        batch, is_kept = self.batch, self.inputs.num_wanted > 0
        places = torch.where(is_kept, batch.kv_lens.long(), 0)
        groups = [
            GroupTables(group.block_tables, slots_of(group.block_tables, places, size, is_kept))
            for group, size in zip(batch.groups, self.state.block_sizes, strict=True)
        ]
        return _over(cache, batch, self.following, batch.positions + is_kept, places.int() + 1, groups)

    def next(self, cache: KVTensors, number: int, token_ids: Tensor) -> ForwardBatch:
        """Return a batch of a token for each request, `number` places behind its last one that was computed.

        Requests that want no more attend to one token, and keep nothing.
        """
        _, _, positions, *slots = self._ahead.numbers[number]
        groups = list(map(GroupTables, self._tables, slots))
        return _over(cache, self.batch, token_ids, positions, self._ahead.kv_lens[number], groups)

    def block(self, cache: KVTensors, count: int, mask_id: int) -> ForwardBatch:
        """Return a batch of the last token of each request and `count` masks, which see each other.

        Of requests that want fewer, only so many are kept and seen.
        """
        numbers, lasts = torch.arange(count + 1, device=self.lasts.device), self.lasts
        wanted = self.inputs.num_wanted[lasts].clamp(min=0)[:, None]
        last_places = self.batch.kv_lens[lasts].long()[:, None] - 1
        last_positions = self.batch.positions[lasts]
        is_live = ((numbers <= wanted) & (wanted > 0)).flatten()
        behind = torch.where(is_live, (last_places + 1 + numbers).flatten(), 0)
        positions = torch.where(is_live, (last_positions[:, None] + 1 + numbers).flatten(), 0)
        lens = torch.where(wanted > 0, last_places + 2 + wanted, 1).expand(-1, count + 1)
        ids = torch.where(numbers > 0, mask_id, self.following[lasts][:, None])
        groups = [
            GroupTables(many := tables.repeat_interleave(count + 1, 0), slots_of(many, behind, size, is_live))
            for tables, size in zip(self._tables, self.state.block_sizes, strict=True)
        ]
        return _over(cache, self.batch, ids.flatten(), positions, lens.flatten().int(), groups)

    def kind(self, *, draws: bool) -> Kind:
        """Return how guesses are chosen."""
        return self.end.kind if draws else Kind.GREEDY

    def choose(self, logits: Tensor, number: int, *, draws: bool, target_ids: Tensor | None = None) -> Tensor:
        """Choose and keep the guess `number` of each request, [R]. logits: [R, size of the vocabulary]

        target_ids: [size], the model's ids of the greedy tokens of a vocabulary of the drafter's own
        """
        sampler, kind = self._sampler, self.kind(draws=draws)
        ids = sampler.choose(logits, self.rows, self._ahead.numbers[number, 0], kind).token_ids
        if target_ids is not None:
            ids = target_ids[ids.clamp_(0, len(target_ids) - 1)]
        return self.keep(ids.clamp_(0, sampler.vocab_size - 1), number)

    def keep(self, ids: Tensor, number: int) -> Tensor:
        """Keep the guess `number` of each request, [R]."""
        self.state.token_ids.view(-1)[self._ahead.numbers[number, 1]] = ids
        return ids

    def look_up(self, least: int, most: int) -> None:
        """Guess what follows the last tokens of each request where they stand earlier in it."""
        state = self.state
        found = self.kernels.look_up(
            state.token_ids, self.rows, state.lengths[self.rows], least, most, self.end.count
        )
        for number, ids in enumerate(found.unbind(1)):
            self.keep(ids, number)


Guesser = Callable[[Links], None]
"""Guesses `end.count` tokens behind a step, which `choose` keeps."""


class GuessClock:
    """Measures what guessing takes on the device; learns it when that is over, and waits for nothing."""

    def __init__(self, *, is_remote: bool) -> None:
        self._is_remote = is_remote
        self._under_way: deque[tuple[Hashable, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._took_s = defaultdict[Hashable, deque[float]](partial(deque, maxlen=_MEASURED))

    def took_s(self, kind: Hashable) -> float | None:
        """Return the least seconds that such work took; None until it was measured a few times."""
        while self._under_way and self._under_way[0][2].query():  # type: ignore[no-untyped-call]
            key, began, ended = self._under_way.popleft()
            self._took_s[key].append(began.elapsed_time(ended) / 1e3)
        found = self._took_s[kind]
        return min(found) if len(found) >= _MEASURED else None

    def measure(self, kind: Hashable, work: Callable[[], None]) -> float:
        """Do what is to be measured; return the seconds that such work took last, 0.0 if unknown."""
        if self._is_remote:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
            began.record()
            work()
            ended.record()
            self._under_way.append((kind, began, ended))
        else:
            began_s = time.perf_counter()
            work()
            self._took_s[kind].append(time.perf_counter() - began_s)
        found = self._took_s[kind]
        return found[-1] if found else 0.0


class ChainedSteps:
    """Begins and ends such steps over the runner's state. sampler: None in stages that choose no tokens"""

    def __init__(self, state: RequestState, sampler: Sampler | None, kernels: ChainKernels) -> None:
        self.state, self.sampler, self.kernels = state, sampler, kernels
        self.clock = GuessClock(is_remote=state.token_ids.device.type != "cpu")
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
        state, self.tables = self.state, tables
        kept_ids = state.token_ids.view(-1)
        self.kernels.move(_rows_of(inputs), state.lengths, kept_ids, tables, state.block_sizes, ids)

    def verify(self, inputs: PackedInputs[Tensor], max_logits: Tensor) -> Tensor:
        """See VerifyDrafts."""
        state = self.state
        return self.kernels.verify(_rows_of(inputs), state.lengths, state.token_ids.view(-1), max_logits)

    def end(
        self,
        inputs: PackedInputs[Tensor],
        batch: ForwardBatch,
        hidden: Tensor,
        max_logits: Tensor,
        end: Chained,
        guesser: Guesser | None,
    ) -> None:
        """Verify the drafts of a step whose tokens are chosen; guess, or leave what `guess` begins with."""
        lasts = self.verify(inputs, max_logits)
        self._begun = partial(Links, batch, hidden, lasts, end, inputs, self)
        if guesser is not None and end.at_once:
            self.guess(guesser)

    def guess(self, guesser: Guesser) -> None:
        """Guess behind the step that ended last."""
        begun, self._begun = self._begun, None
        assert begun is not None
        guesser(begun())


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


def _rows_of(inputs: PackedInputs[Tensor]) -> ChainRows:
    return ChainRows(*(getattr(inputs, name) for name in ChainRows._fields))
