"""`StateDrafter` guesses from the model's hidden states by layers with a cache: EAGLE and MTP.

Its layers see every token that the model computes, so their cache is always complete; but where a cached
beginning ends, the last entry was made with the token that followed there, which may be another's.
"""

import numpy as np
from torch import Tensor

from octavo.runtime.models.draft_heads import DraftHead
from octavo.runtime.sampling.sampler import Sampler
from octavo.runtime.speculative.drafter import Drafter, KVView, MakeReplayer, Turn, columns
from octavo.runtime.transfer import Array, to_device
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.request_state import RequestState

_FEW = 32
"""Tokens of one request that are computed as rows of one token each, which may be replayed."""


class StateDrafter(Drafter):
    """Computes an entry for each token whose next one is known, and guesses behind the last."""

    reads = "all"

    def __init__(self, model: DraftHead) -> None:
        self.model = model
        self.kv_specs = [layer.kv_spec for layer in model.cache_layers]
        self.weight_bytes = model.weight_bytes

    def equip(self, cache: KVTensors, state: RequestState, sampler: Sampler, make: MakeReplayer) -> None:
        super().equip(cache, state, sampler, make)
        first = len(cache.group_of_layer) - len(self.kv_specs)
        self._replayer = make(self.model, KVView(cache, first), state.shifted())

    def propose(self, turn: Turn) -> Tensor | None:
        """See Drafter; of drafts that did not come true, nothing is computed."""
        assert turn.hidden is not None
        lengths = turn.ends - turn.begins
        firsts = turn.work.starts[np.searchsorted(turn.work.owners, np.arange(len(turn.rows)))]
        kept = np.arange(lengths.sum()) + (firsts - lengths.cumsum() + lengths).repeat(lengths)
        states = self.model.combine(turn.hidden[to_device(kept, turn.hidden.device)])
        hidden = self._compute(turn.rows, turn.begins, turn.ends, states)
        places, rows, ends, counts = np.arange(len(turn.rows)), turn.rows, turn.ends, turn.counts
        found: list[tuple[Array, Tensor]] = []
        for number in range(int(counts.max(initial=0))):
            live = counts > number
            if not live.all():
                hidden = hidden[to_device(np.flatnonzero(live), hidden.device)]
            places, rows, ends, counts = (a[live] for a in (places, rows, ends, counts))
            if number:
                hidden = self._compute(rows, ends - 1, ends, hidden)
            ends = ends + 1
            ids = self.choose(self.model.logits(hidden), rows, ends)
            self._state.append(rows, ends, ids)
            found.append((places, ids))
        return columns(found, len(turn.rows))

    def _compute(self, rows: Array, starts: Array, ends: Array, states: Tensor) -> Tensor:
        """Compute the entries from `starts` to `ends` of each row, [T] in all; return their last states."""
        counts = ends - starts
        lasts, replay = counts.cumsum() - 1, None
        if counts.max() <= _FEW:
            owners = np.arange(len(rows)).repeat(counts)
            computed = np.arange(len(owners)) + (starts - lasts - 1 + counts)[owners]
            # The order in which replays compute them: the longest first.
            order = (-computed).argsort(kind="stable")
            computed, singles = computed[order], np.arange(len(owners) + 1)
            where = order.argsort()[lasts]
            work = Work(
                rows[owners[order]], computed, computed + 1, singles, where, owners[order], len(owners)
            )
            states = states[to_device(order, states.device)]
            replay = self._replayer.find(work, None)
        else:
            everyone = np.arange(len(rows))
            work = Work(rows, starts, ends, np.append(0, lasts + 1), everyone, everyone, 0)
        self.model.put(states, stays=replay is not None)
        if replay is not None:
            hidden = replay()
            assert isinstance(hidden, Tensor)
            return hidden
        hidden = self._replayer.compute(work, (), PendingStep(0, [], work.samples))
        self._replayer.after_eager(work, None)
        return hidden
