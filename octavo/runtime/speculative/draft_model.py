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
from octavo.runtime.speculative.drafter import Drafter, KVView, MakeReplayer, Turn, columns, hidden_states
from octavo.runtime.transfer import Array
from octavo.runtime.worker.chained_steps import Links
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.request_state import RequestState

_FEW = 4
"""Tokens of one request that are computed as rows of one token each, which may be replayed."""


class DraftModel(Drafter):
    """Has a model, and knows by row how far its cache agrees with the tokens."""

    chains, idles = True, True

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
        self._num_known = np.zeros(config.scheduler.max_num_rows, np.int64)
        self._is_level = np.zeros(config.scheduler.max_num_rows, bool)
        """By row: its cache has the last token that was sampled, of steps in flight, too."""

    def equip(self, cache: KVTensors, state: RequestState, sampler: Sampler, make: MakeReplayer) -> None:
        super().equip(cache, state, sampler, make)
        first = len(cache.group_of_layer) - len(self.kv_specs)
        self._cache = KVView(cache, first)
        self._replayer = make(self.model, self._cache, state)

    def miss(self, rows: Array) -> None:
        self._is_level[rows] = False

    def follows(self, rows: Array, counts: Array) -> bool:
        """See Drafter: its cache must not lack anything but what the step brings."""
        if not self._is_level[rows[counts > 0]].all():
            return False
        self.miss(rows[counts == 0])
        return True

    def chain(self, links: Links) -> None:
        """See Drafter; entries of drafts that did not come true are written over by the next step."""
        if not (count := links.end.count):
            return
        hidden = self.model.forward(links.ahead(self._cache))[links.lasts]
        for number in range(count):
            ids = links.choose(self._logits(hidden), number, draws=self.draws)
            if number + 1 < count:
                hidden = self.model.forward(links.next(self._cache, number + 2, ids))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        return logits if self._missing is None else logits.index_fill_(1, self._missing, -torch.inf)

    def propose(self, turn: Turn) -> Tensor | None:
        """See Drafter: first compute what the request has got since it was last asked."""
        known = np.where(self._is_level[turn.rows], turn.begins + 1, self._num_known[turn.rows])
        known = np.where(turn.cached >= 0, turn.cached, known)
        self._is_level[turn.rows] = turn.counts > 0
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
            ids = self.choose(self._logits(hidden), rows, ends)
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
        return hidden_states(self._replayer, work, replay)
