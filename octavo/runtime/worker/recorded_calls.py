"""`RecordedCalls` makes a step of a CPU one call of C instead of hundreds from Python.

A step of one token per request is written into arrays that stay where they are, padded to the next size by
rows that store nothing, and replayed from the calls of that size, which are recorded when the size is first
met. Other steps are recorded to be replayed once: every kernel would throw Python out of the caches, so that
the same Python costs less in one go. Steps that cannot be recorded are left to the model itself.

Called by the model runner where calls of kernels can be recorded. There the state is host memory, and numpy's
view of it costs a tenth of what calls of torch do.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo.runtime.batch import ForwardBatch, group_tables
from octavo.runtime.distributed.context import ALONE, ParallelContext
from octavo.runtime.kernels.sampling import Choice
from octavo.runtime.kernels.steps import RecordCalls
from octavo.runtime.lora.sites import Reach
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.sampler import Kind
from octavo.runtime.transfer import Array
from octavo.runtime.worker.chained_steps import End
from octavo.runtime.worker.handover import Handover
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.replayer import Replay, Replayer, Variant, one_variant
from octavo.runtime.worker.request_state import RequestState

_MOST_ROWS = 128
_FEWEST_TOKENS = 256  # below, recording a step costs more than Python between its kernels
T = TypeVar("T")


class _Shape(NamedTuple):
    """What recordings differ in. reach: as in Work; is_greedy: they end with tokens"""

    num_rows: int
    reach: Reach = Reach.NOTHING
    is_greedy: bool = False


class RecordedCalls(Replayer):
    """Computes what the model computes, to the bit."""

    def __init__(
        self,
        model: Model,
        cache: KVTensors,
        state: RequestState,
        record: RecordCalls,
        variant: Variant = one_variant,
        parallel: ParallelContext = ALONE,
    ) -> None:
        """variant: what surrounds the recording of a step; parallel: it is_recordable"""
        assert state.host_tokens is not None, "the state is not in host memory"
        super().__init__(model, cache, state, batch_invariant=True)
        self._record, self._variant, self._ranks = record, variant, parallel.tp
        self._handover = Handover(model, parallel.pp, _MOST_ROWS, torch.device("cpu"))
        self._tokens = state.host_tokens
        self._least_block = min(state.block_sizes)
        self._is_recordable = True
        self._too_many: float = math.inf
        self._recorded: dict[_Shape, Callable[[], Tensor | Choice]] = {}
        """What computes the first rows of the inputs, and returns their hidden states or tokens."""
        num_groups, _, max_blocks = state.host_tables.shape
        self._ids, self._positions = np.zeros((2, _MOST_ROWS), np.int64)
        self._kv_lens = np.ones(_MOST_ROWS, np.int32)
        self._bounds = np.arange(_MOST_ROWS + 1, dtype=np.int32)
        self._tables = np.zeros((num_groups, _MOST_ROWS, max_blocks), np.int32)
        self._cache_slots = np.full((num_groups, _MOST_ROWS), -1)
        self._source_lens = np.ones(_MOST_ROWS, np.int32)

    def find(self, work: Work, end: End) -> Replay | None:
        """See Replayer.find: a step of one token per request, up to its tokens where they are greedy."""
        num_rows = work.num_singles
        if not num_rows == len(work.rows) <= _MOST_ROWS:
            return None
        size = _padded(num_rows)
        shape = _Shape(size, work.reach, end is Kind.GREEDY and len(work.samples) == num_rows)
        return partial(self._replay, work, shape) if self._can_replay(shape) else None

    def _replay(self, work: Work, shape: _Shape) -> Tensor | Choice:
        self._stage(work, shape.num_rows)
        own = np.arange(len(work.rows))
        self._handover.receive(own)
        if isinstance(found := self._recorded[shape](), Choice):
            return Choice(*(part[: len(own)] for part in found))
        hidden = found[: len(own)]
        self._handover.keep(hidden)
        self._handover.send(own)
        return hidden if len(work.samples) == len(work.rows) else hidden[work.samples]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See Replayer.forward: recorded to be replayed once, if the step is long enough."""
        num_tokens = len(batch.positions)
        is_fit = _FEWEST_TOKENS <= num_tokens < self._too_many and batch.given_embeds is None
        is_fit = is_fit and batch.source_queries is None and batch.patch_positions is None
        is_fit = is_fit and self._handover.is_alone
        if is_fit and self._can_replay(_Shape(1)):
            once = replace(batch, rotations={}, shared={})
            if (replay := self._record_forward(once, _hidden)) is not None:
                return replay()
            self._too_many = num_tokens  # as one token can be recorded, this is for want of memory
        return self.model.forward(batch)

    def _stage(self, work: Work, size: int) -> None:
        """Put a step into the first rows; those behind read one slot of block 0, and store nothing."""
        state, rows, positions = self._state, work.rows, work.computed
        count = len(rows)
        used = state.host_tables.shape[2]
        if state.reads_sources:
            self._source_lens[:count] = state.source_lens.numpy()[rows]
            self._source_lens[count:size] = 1
        else:
            used = int(positions.max()) // self._least_block + 1
        np.maximum(self._tokens[rows, positions], 0, out=self._ids[:count])  # a draft may be none, -1
        self._positions[:count] = state.rope_positions(rows, positions)
        self._kv_lens[:count] = positions + 1
        self._kv_lens[count:size] = 1
        self._tables[:, :count, :used] = state.host_tables[:, rows, :used]
        self._tables[:, count:size, 0] = 0
        self._cache_slots[:, :count] = state.cache_slots(rows, positions)
        self._cache_slots[:, count:size] = -1

    def _can_replay(self, shape: _Shape) -> bool:
        """Record a step of that shape, if need be; return False if steps cannot be recorded."""
        if self._is_recordable and shape not in self._recorded:
            size, replay = shape.num_rows, None
            with self._variant(shape.reach):
                if shape.is_greedy:
                    replay = self._record_forward(self._batch(size), self._choose)
                if replay is None:  # choosing may be what cannot be recorded
                    replay = self._record_forward(self._batch(size), _hidden)
            # All ranks replay steps of a size, or none: a message is as long on all of them.
            self._is_recordable = bool(self._ranks.least(int(replay is not None), torch.device("cpu")))
            if self._is_recordable and replay is not None:
                self._recorded[shape] = replay
        return self._is_recordable

    def _record_forward(self, batch: ForwardBatch, end: Callable[[Tensor], T]) -> Callable[[], T] | None:
        """Return what computes a batch, up to `end` of its hidden states; None if it cannot be recorded."""
        return self._record(lambda: end(self.model.forward(batch)))

    def _choose(self, hidden: Tensor) -> Tensor | Choice:
        """Return the greedy tokens if the model has a kernel for them, `hidden` otherwise."""
        found = self.model.greedy(hidden)
        return hidden if found is None else Choice(*found)

    def _batch(self, size: int) -> ForwardBatch:
        return ForwardBatch(
            input_ids=_rows(self._ids, size),
            positions=_rows(self._positions, size),
            cu_q_lens=_rows(self._bounds, size + 1),
            kv_lens=_rows(self._kv_lens, size),
            kv_caches=self._cache.by_layer,
            groups=group_tables(
                (_rows(tables, size) for tables in self._tables),
                (_rows(slots, size) for slots in self._cache_slots),
            ),
            group_of_layer=self._cache.group_of_layer,
            num_singles=size,
            source_lens=_rows(self._source_lens, size) if self._state.reads_sources else None,
            entered=self._handover.entered(size),
        )


def _hidden(hidden: Tensor) -> Tensor:
    return hidden


def _rows(array: Array, count: int) -> Tensor:
    return torch.from_numpy(array[:count])


def _padded(num_rows: int) -> int:
    """Pad to every number up to 8, then to fewer: recording takes longer than to compute some more rows."""
    unit = 1 if num_rows <= 8 else 4 if num_rows <= 16 else 8
    return -(-num_rows // unit) * unit
