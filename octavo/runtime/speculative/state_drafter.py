"""`StateDrafter` guesses from the model's hidden states by layers with a cache: EAGLE and MTP.

Its layers see every token that the model computes, so their cache is always complete; but where a cached
beginning ends, the last entry was made with the token that followed there, which may be another's.
"""

import numpy as np
from torch import Tensor

from octavo.runtime.models.draft_heads import DraftHead
from octavo.runtime.sampling.sampler import Kind, Sampler
from octavo.runtime.speculative.drafter import Drafter, KVView, MakeReplayer, Turn, columns, hidden_states
from octavo.runtime.transfer import Array, to_device
from octavo.runtime.worker.chained_steps import Links
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.request_state import RequestState

_FEW = 32
"""Tokens of one request that are computed as rows of one token each, which may be replayed."""


class StateDrafter(Drafter):
    """Computes an entry for each token whose next one is known, and guesses behind the last."""

    reads, chains = "all", True

    def __init__(self, model: DraftHead) -> None:
        self.model = model
        self.kv_specs = [layer.kv_spec for layer in model.cache_layers]
        self.weight_bytes = model.weight_bytes

    def equip(self, cache: KVTensors, state: RequestState, sampler: Sampler, make: MakeReplayer) -> None:
        super().equip(cache, state, sampler, make)
        self._cache = KVView(cache, len(cache.group_of_layer) - len(self.kv_specs))
        self._replayer = make(self.model, self._cache, state.shifted())
        self.model.leaves_states = self._replayer.samples

    def propose(self, turn: Turn) -> Tensor | None:
        """See Drafter; of drafts that did not come true, nothing is computed."""
        states = self.model.combine(turn.kept_states)
        if (replayed := self._replay(turn, states)) is not None:
            return replayed
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

    def chain(self, links: Links) -> None:
        """See Drafter; entries of drafts that did not come true are written over by the next step."""
        model, count = self.model, links.end.count
        model.put(model.combine(links.hidden), stays=False)
        hidden = model.forward(links.whole(self._cache))[links.lasts]
        is_greedy = links.kind(draws=self.draws) is Kind.GREEDY
        guess, target_ids = (model.own_logits, model.target_ids) if is_greedy else (model.logits, None)
        for number in range(count):
            ids = links.choose(guess(hidden), number, draws=self.draws, target_ids=target_ids)
            if number + 1 < count:
                model.put(hidden, stays=False)
                hidden = model.forward(links.next(self._cache, number + 1, ids))

    def _replay(self, turn: Turn, states: Tensor) -> Tensor | None:
        """Do so by replays that end with tokens: the host takes no part in between. None: it has to."""
        live = np.flatnonzero(turn.counts)
        kind = self.kind(turn.rows[live]) if live.size else Kind.GREEDY
        is_drawn = kind is not Kind.GREEDY and self._sampler.rejection is not None
        longest = (turn.ends - turn.begins).max()
        if not live.size or is_drawn or not self._replayer.samples or longest > _FEW:
            return None
        live = live[(-turn.ends[live]).argsort(kind="stable")]
        rows, ends, counts = turn.rows[live], turn.ends[live], turn.counts[live]
        work, order = _as_singles(turn.rows, turn.begins, turn.ends)
        work.samples = work.samples[live]
        if (replay := self._replayer.find(work, kind)) is None:
            return None
        self.model.put(states[to_device(order, states.device)], stays=True)
        replay()
        places = work.samples
        for number in range(1, int(counts.max())):
            stay = counts > number
            if number == 1 or not stay.all():
                self.model.go_on(to_device(places[stay], states.device))
            rows, ends, counts = rows[stay], ends[stay] + 1, counts[stay]
            places = np.arange(len(rows))
            work = Work(rows, ends - 1, ends, np.arange(len(rows) + 1), places, places, len(rows))
            replay = self._replayer.find(work, kind)
            assert replay is not None
            replay()
        return self._state.tokens_behind(turn.rows, turn.ends + 1, int(turn.counts.max()))

    def _compute(self, rows: Array, starts: Array, ends: Array, states: Tensor) -> Tensor:
        """Compute the entries from `starts` to `ends` of each row, [T] in all; return their last states."""
        counts = ends - starts
        lasts, replay = counts.cumsum() - 1, None
        if counts.max() <= _FEW:
            work, order = _as_singles(rows, starts, ends)
            states = states[to_device(order, states.device)]
            replay = self._replayer.find(work, None)
        else:
            everyone = np.arange(len(rows))
            work = Work(rows, starts, ends, np.append(0, lasts + 1), everyone, everyone, 0)
        self.model.put(states, stays=replay is not None)
        return hidden_states(self._replayer, work, replay)


def _as_singles(rows: Array, starts: Array, ends: Array) -> tuple[Work, Array]:
    """Return work of a row per token, in the order of replays, the longest first; and that order."""
    counts = ends - starts
    lasts, owners = counts.cumsum() - 1, np.arange(len(rows)).repeat(counts)
    computed = np.arange(len(owners)) + (starts - lasts - 1 + counts)[owners]
    order = (-computed).argsort(kind="stable")
    computed, singles, owners = computed[order], np.arange(len(owners) + 1), owners[order]
    where = order.argsort()[lasts]
    return Work(rows[owners], computed, computed + 1, singles, where, owners, len(owners)), order
