"""`DraftPart` sees to drafts: how many came true, and what its drafter guesses behind each step.

Where steps are planned ahead, nobody waits to know that: captured steps verify and guess on the device
(worker/chained_steps). A step that cannot be one of these waits for the one before.
"""

import time

import msgspec
import numpy as np
from torch import Tensor

from octavo.messages.step import NewRequest, SchedulerOutput
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.sampler import Kind, Sampler
from octavo.runtime.speculative.drafter import Drafter, MakeReplayer, Turn
from octavo.runtime.transfer import Array
from octavo.runtime.worker.chained_steps import Chained, End
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import ChainedRows, Work
from octavo.runtime.worker.replayer import Replayer
from octavo.runtime.worker.request_state import RequestState
from octavo.runtime.worker.step_part import StepPart

_UNSEEN = -2
"""Tokens that a request had cached which no step has computed yet."""


class DraftPart(StepPart):
    """Tells the drafter, if there is one, what steps computed, and how many tokens the engine wants."""

    def __init__(self, state: RequestState, sampler: Sampler) -> None:
        super().__init__()
        self._state, self._sampler = state, sampler
        self._drafter: Drafter | None = None
        self._replayer: Replayer | None = None
        self.others: list[StepPart] = []
        """With what a request may want of these, a step is not chained."""
        self._cached = np.full(len(state.num_tokens), _UNSEEN)
        self._is_whole = True
        self._hidden: Tensor | None = None
        self._step: SchedulerOutput | None = None
        self._chained: Chained | None = None
        self._last: PendingStep | None = None
        self._last_is_chained = False

    def equip(
        self, drafter: Drafter | None, cache: KVTensors, replayer: Replayer, make_replayer: MakeReplayer
    ) -> None:
        """Guess by `drafter`, over the cache as it is allocated now, behind the steps of `replayer`."""
        self._drafter, self._replayer, self._last = drafter, replayer, None
        if drafter is not None:
            drafter.equip(cache, self._state, self._sampler, make_replayer)
            replayer.guess = drafter.chain if drafter.chains else None

    def strip(self) -> None:
        """Let the drafter go."""
        self._drafter = self._replayer = None

    def add(self, row: int, request: NewRequest) -> None:
        self._cached[row] = _UNSEEN

    def read(self, request: NewRequest) -> None:
        """See StepPart: it serves all requests, and steps may be replayed beside it."""

    def settle(self, step: SchedulerOutput, rows: Array) -> SchedulerOutput:
        """See StepPart: wait for the step before, unless this one is chained to it."""
        drafter, self._chained = self._drafter, self._chain(step, rows)
        if step.unread and not (self._chained and self._last_is_chained):
            assert self._last is not None, "no step verified the drafts"
            tokens = dict(zip(self._last.request_ids, self._last.read().sampled_token_ids, strict=True))
            computed = list(step.num_computed_tokens)
            for place in step.unread:
                computed[place] += len(tokens[step.request_ids[place]]) - 1
            step = msgspec.structs.replace(step, num_computed_tokens=computed, unread=[])
        self._step = step
        self._is_shown = drafter is not None and not (drafter.idles and not any(step.num_drafts))
        new = self._cached[rows] == _UNSEEN
        self._cached[rows[new]] = np.array(step.num_computed_tokens, np.int64)[new]
        if drafter is not None and not (self._is_shown or self._chained):
            drafter.miss(rows)
        return step

    def _chain(self, step: SchedulerOutput, rows: Array) -> Chained | None:
        """Return how the step ends if it is chained: its rows decode, and nothing but the logits decides."""
        drafter, replayer, num_drafts = self._drafter, self._replayer, max(step.num_drafts, default=0)
        if step.tells_drafts or replayer is None or not replayer.can_chain(step.num_tokens):
            return None
        needs_device = step.drafts or (step.unread and self._last_is_chained) or num_drafts
        if not needs_device and (drafter is None or drafter.reads != "all"):
            return None
        has_masks = step.masks_follow or step.token_masks is not None
        if (drafter is not None and not drafter.chains) or has_masks or len(rows) == 0:
            return None
        if sum(step.num_scheduled_tokens) != len(rows) or any(part.is_wanted for part in self.others):
            return None
        kind = self._sampler.plain_kind(rows)
        is_drawn = kind is not Kind.GREEDY and self._sampler.rejection is not None
        if kind is None or is_drawn or not self._state.are_last(rows, step.num_computed_tokens):
            return None
        if drafter is None:
            return Chained(kind, 0)
        counts = np.array(step.num_drafts or [0] * len(rows), np.int64)
        return Chained(kind, min(num_drafts, drafter.most)) if drafter.follows(rows, counts) else None

    def end(self, end: End) -> End:
        if self._chained is not None:
            return self._chained
        return None if self._is_shown and self._drafter is not None and self._drafter.reads else end

    def begin(self, work: Work) -> None:
        """See StepPart; where not all tokens sample, a drafter may want the states of the others."""
        if self._chained is not None:
            assert self._step is not None
            work.chained = ChainedRows.of(self._step, work.owners)
        wants_all = self._drafter is not None and self._drafter.reads == "all"
        self._is_whole = not wants_all or work.num_singles == len(work.rows) == len(work.samples)

    @property
    def is_idle(self) -> bool:
        return self._is_whole

    def before(self, work: Work, batch: ForwardBatch) -> None:
        if not self._is_whole:
            batch.wanted = None

    def after(self, work: Work, hidden: Tensor, model: Model, outcome: PendingStep) -> None:
        if not self._is_whole:
            self._hidden = hidden

    def follow(self, step: SchedulerOutput, work: Work, hidden: Tensor | None, outcome: PendingStep) -> None:
        """See StepPart; waits for the step if somebody guesses behind it: that depends on its tokens."""
        drafter, self._last, self._last_is_chained = self._drafter, outcome, self._chained is not None
        if drafter is None or self._last_is_chained or not self._is_shown:
            return
        result, began_s = outcome.read(), time.perf_counter()
        if not self._is_whole:
            hidden, self._hidden = self._hidden, None
        turn = self._turn(step, work, hidden, result.sampled_token_ids, drafter.most)
        if self._sampler.rejection is not None:
            self._sampler.rejection.begin()
        before = self._state.num_tokens[turn.rows]
        if (found := drafter.propose(turn)) is not None:
            if step.tells_drafts:
                for place, tokens in enumerate(found.tolist()):
                    if count := int(turn.counts[place]):
                        result.drafts[place] = [token for token in tokens[:count] if token >= 0]
            else:
                self._state.put_behind(turn.rows, turn.ends + 1, turn.counts, found)
            self._state.num_tokens[turn.rows] = np.where(turn.counts > 0, turn.ends + 1, before)
        result.draft_s = time.perf_counter() - began_s

    def _turn(
        self, step: SchedulerOutput, work: Work, hidden: Tensor | None, sampled: list[list[int]], most: int
    ) -> Turn:
        rows = self._state.rows(step.request_ids)
        begins = np.array(step.num_computed_tokens, np.int64)
        kept = np.array([len(token_ids) for token_ids in sampled], np.int64)
        ends = begins + np.array(step.num_scheduled_tokens, np.int64) + np.maximum(kept - 1, 0)
        has_sampled = kept > 0
        self._state.num_tokens[rows[has_sampled]] = ends[has_sampled] + 1
        counts = np.array(step.num_drafts or [0] * len(rows), np.int64)
        counts = np.minimum(counts, np.minimum(self._room(rows, ends), most)) * has_sampled
        firsts = np.searchsorted(work.owners, np.arange(len(rows)))
        lasts, cached = firsts + np.maximum(kept - 1, 0), self._cached[rows]
        self._cached[rows] = -1
        return Turn(work, hidden, rows, begins, ends, counts, lasts, cached)

    def _room(self, rows: Array, ends: Array) -> Array:
        """Return how many tokens behind the last one have a place and a block."""
        num_spare = self._drafter.num_spare if self._drafter is not None else 0
        room: Array = np.maximum(self._state.capacity(rows) - ends - num_spare, 0)
        return room
