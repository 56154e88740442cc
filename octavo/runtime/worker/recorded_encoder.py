"""`RecordedEncoder` makes a step of an encoder one call of C, however many tokens and texts it has.

A step is written into arrays that stay where they are, its lengths into the recorded calls. One with more
tokens or texts is recorded to be replayed once, as in recorded_calls.

Called by the model runner for pooling models without a cache, where calls of kernels can be recorded.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.runtime.attention.step_cache import BLOCK, lay_out
from octavo.runtime.batch import ForwardBatch, StepTables
from octavo.runtime.kernels.steps import RecordCalls
from octavo.runtime.models.interface import Model
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.prepare import Work, token_positions
from octavo.runtime.worker.replayer import Eager
from octavo.runtime.worker.request_state import RequestState

_TOKENS = 509, 511  # up to 512, the table chooses the same kernels
_TEXTS = 126, 127
_COLUMNS = np.arange(_TOKENS[1] // BLOCK + 1)


class RecordedEncoder(Eager):
    """Computes what the model computes, to the bit."""

    def __init__(self, model: Model, cache: KVTensors, state: RequestState, record: RecordCalls) -> None:
        super().__init__(model, cache, state, batch_invariant=True)
        self._record = record
        self._replays: dict[bool, Callable[..., Tensor] | None] = {}
        """By whether tokens have types."""
        self._of_tokens = np.zeros((4, _TOKENS[1]), np.int64)
        self._of_texts = np.zeros((2, _TEXTS[1] + 1), np.int32)
        self._tables = np.zeros((_TEXTS[1], len(_COLUMNS)), np.int32)

    def make_batch(self, work: Work) -> tuple[ForwardBatch, Tensor]:
        """See Replayer.make_batch: of a step that is not too large, in the arrays."""
        num_tokens, num_texts = int(work.starts[-1]), len(work.rows)
        if num_tokens > _TOKENS[1] or num_texts > _TEXTS[1]:
            return super().make_batch(work)
        rows, positions = token_positions(work)
        assert self._state.host_tokens is not None
        num_blocks = -(-work.ends // BLOCK)
        first = num_blocks.cumsum() - num_blocks
        slots = (first * BLOCK).repeat(work.ends) + positions
        self._of_tokens[:3, :num_tokens] = self._state.host_tokens[rows, positions], positions, slots
        self._of_texts[0, : num_texts + 1], self._of_texts[1, :num_texts] = work.starts, work.ends
        self._tables[:num_texts] = first[:, None] + _COLUMNS
        last_rows = torch.from_numpy(work.starts[work.samples + 1] - 1)
        return self._batch(num_tokens, num_texts, has_types=False), last_rows

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See Replayer.forward."""
        types, num_tokens = batch.token_types, len(batch.positions)
        if (has_types := types is not None) not in self._replays:
            self._replays[has_types] = self._record(
                lambda *lengths: self.model.forward(self._batch(*lengths, has_types=has_types)),
                _TOKENS,
                _TEXTS,
            )
        if (replay := self._replays[has_types]) is None:
            return self.model.forward(batch)
        if batch.step_tables is None:
            batch = replace(batch, step_tables=lay_out(batch))
            return (self._record(partial(self.model.forward, batch)) or partial(self.model.forward, batch))()
        if types is not None:
            self._of_tokens[3, :num_tokens] = types
        return replay(num_tokens, len(batch.kv_lens))[:num_tokens]

    def _batch(self, num_tokens: int, num_texts: int, *, has_types: bool) -> ForwardBatch:
        """Return a batch of the first tokens and texts of the arrays."""
        ids, positions, slots, types = torch.from_numpy(self._of_tokens[:, :num_tokens])
        bounds, lens = torch.from_numpy(self._of_texts)
        tables = torch.from_numpy(self._tables[:num_texts])
        return ForwardBatch(
            input_ids=ids,
            positions=positions,
            token_types=types if has_types else None,
            cu_q_lens=bounds[: num_texts + 1],
            kv_lens=lens[:num_texts],
            kv_caches=[],
            groups=[],
            group_of_layer=[],
            step_tables=StepTables(tables, slots, _TOKENS[1] // BLOCK + _TEXTS[1]),
        )
