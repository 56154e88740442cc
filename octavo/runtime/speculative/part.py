"""`DraftPart` has a drafter guess behind each step, and sends the tokens to the engine with its result."""

import time

import numpy as np
from torch import Tensor

from octavo.messages.step import NewRequest, SchedulerOutput
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.sampler import Sampler
from octavo.runtime.speculative.drafter import Drafter, MakeReplayer, Turn
from octavo.runtime.transfer import Array
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.request_state import RequestState
from octavo.runtime.worker.step_part import StepPart


class DraftPart(StepPart):
    """Tells the drafter what steps computed, and how many tokens the engine wants."""

    def __init__(self, state: RequestState, sampler: Sampler) -> None:
        super().__init__()
        self._state, self._sampler = state, sampler
        self._drafter: Drafter | None = None
        self._is_new = np.ones(len(state.num_tokens), bool)
        self._is_whole = True
        self._hidden: Tensor | None = None

    def equip(self, drafter: Drafter, cache: KVTensors, make_replayer: MakeReplayer) -> None:
        """Guess by `drafter`, over the cache as it is allocated now."""
        drafter.equip(cache, self._state, self._sampler, make_replayer)
        self._drafter, self.reads_hidden = drafter, bool(drafter.reads)

    def strip(self) -> None:
        """Let the drafter go."""
        self._drafter = None

    def add(self, row: int, request: NewRequest) -> None:
        self._is_new[row] = True

    def read(self, request: NewRequest) -> None:
        """See StepPart: it serves all requests, and steps may be replayed beside it."""

    def begin(self, work: Work) -> None:
        """See StepPart; where not all tokens sample, a drafter may want the states of the others."""
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
        """See StepPart; waits for the step, for what is guessed depends on its tokens."""
        drafter = self._drafter
        assert drafter is not None, "the weights have been given up"
        result, began_s = outcome.read(), time.perf_counter()
        if not self._is_whole:
            hidden, self._hidden = self._hidden, None
        turn = self._turn(step, work, hidden, result.sampled_token_ids, drafter.most)
        if self._sampler.rejection is not None:
            self._sampler.rejection.begin()
        before = self._state.num_tokens[turn.rows]
        if (found := drafter.propose(turn)) is not None:
            for place, tokens in enumerate(found.tolist()):
                if count := int(turn.counts[place]):
                    result.drafts[place] = tokens[:count]
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
        lasts, is_new = firsts + np.maximum(kept - 1, 0), self._is_new[rows]
        self._is_new[rows] = False
        return Turn(work, hidden, rows, begins, ends, counts, lasts, is_new)

    def _room(self, rows: Array, ends: Array) -> Array:
        """Return how many tokens behind the last one have a place and a block."""
        room: Array = np.maximum(self._state.capacity(rows) - ends, 0)
        return room
