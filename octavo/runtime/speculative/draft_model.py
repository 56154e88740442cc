"""`DraftModel`: a smaller language model guesses, token after token.

It reads the request's tokens by itself. While nothing is wanted of it, it computes nothing, and catches up
when it is asked again. Source: https://arxiv.org/abs/2211.17192
"""

import numpy as np
import torch
from torch import Tensor

from octavo.base.errors import Unsupported
from octavo.config.engine import EngineConfig
from octavo.messages.kv import StateKV
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.sampler import Sampler
from octavo.runtime.speculative.drafter import Drafter, KVView, MakeReplayer, Turn, columns
from octavo.runtime.transfer import Array
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.request_state import RequestState

_FEW = 4
"""Tokens of one request that are computed as rows of one token each, which may be replayed."""


class DraftModel(Drafter):
    """Has a model, and knows by row how far its cache agrees with the tokens."""

    def __init__(self, model: Model, config: EngineConfig, missing: Tensor | None = None) -> None:
        """missing: [n] int64, tokens of the vocabulary that it never guesses"""
        self.model, self._missing = model, missing
        self.kv_specs = [layer.kv_spec for layer in model.cache_layers]
        if any(isinstance(spec, StateKV) for spec in self.kv_specs):
            raise Unsupported(
                "A draft model cannot have recurrent layers, as it reads its own guesses: use another one."
            )
        self.weight_bytes = model.weight_bytes
        self._max_tokens = config.scheduler.max_num_batched_tokens
        windows = [spec.sliding_window for spec in self.kv_specs if spec.sliding_window]
        self._reach = min(windows, default=1 << 40)
        """Positions behind the last whose blocks are surely still the request's."""
        self._num_known = np.zeros(config.scheduler.max_num_seqs, np.int64)

    def equip(self, cache: KVTensors, state: RequestState, sampler: Sampler, make: MakeReplayer) -> None:
        super().equip(cache, state, sampler, make)
        first = len(cache.group_of_layer) - len(self.kv_specs)
        self._replayer = make(self.model, KVView(cache, first), state)

    def propose(self, turn: Turn) -> Tensor | None:
        """See Drafter: first compute what the request has got since it was last asked."""
        known = np.where(turn.is_new, turn.begins, self._num_known[turn.rows])
        known = self._num_known[turn.rows] = np.minimum(known, turn.ends)
        known = np.maximum(known, turn.ends - self._reach)
        places = np.flatnonzero(turn.counts)
        if not places.size:
            return None
        rows, ends, counts = turn.rows[places], turn.ends[places], turn.counts[places]
        starts = self._catch_up(rows, known[places], ends)
        found: list[tuple[Array, Tensor]] = []
        for number in range(int(counts.max())):
            live = counts > number
            rows, starts, ends, places, counts = (a[live] for a in (rows, starts, ends, places, counts))
            hidden = self._compute(rows, starts, ends + 1)
            starts = ends = ends + 1
            logits = self.model.logits(hidden)
            if self._missing is not None:
                logits.index_fill_(1, self._missing, -torch.inf)
            ids = self.choose(logits, rows, ends)
            self._state.append(rows, ends, ids)
            self._num_known[rows] = ends
            found.append((places, ids))
        return columns(found, len(turn.rows))

    def _catch_up(self, rows: Array, starts: Array, ends: Array) -> Array:
        """Compute long arrears in pieces no longer than a step; return where each request stands then."""
        most = max(1, self._max_tokens // len(rows))
        while (late := ends - starts >= most).any():
            until = np.minimum(starts + most, ends)
            self._compute(rows[late], starts[late], until[late])
            starts = np.where(late, until, starts)
            if most == 1:
                break
        return starts

    def _compute(self, rows: Array, starts: Array, ends: Array) -> Tensor:
        """Compute the tokens from `starts` to `ends` of each row: hidden states of the last, [R, size]."""
        counts = ends - starts
        lasts = counts.cumsum() - 1
        if counts.max() <= _FEW:
            owners = np.arange(len(rows)).repeat(counts)
            computed = np.arange(len(owners)) - (lasts - counts + 1)[owners] + starts[owners]
            singles = np.arange(len(owners) + 1)
            work = Work(rows[owners], computed, computed + 1, singles, lasts, owners, len(owners))
        else:
            cuts = np.concatenate(([0], lasts + 1))
            everyone = np.arange(len(rows))
            work = Work(rows, starts, ends, cuts, everyone, everyone, 0)
        replay = self._replayer.find(work, None)
        if replay is not None:
            hidden = replay()
            assert isinstance(hidden, Tensor)
            return hidden
        hidden = self._replayer.compute(work, (), PendingStep(0, [], work.samples))
        self._replayer.after_eager(work, None)
        return hidden
