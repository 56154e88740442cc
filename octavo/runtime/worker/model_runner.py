"""`ModelRunner` gives one step to one rank: it updates the batch, has the step computed; its head ends it.

A step whose masks follow is computed up to the logits, and ended by `sample`.

The worker calls it for every SchedulerOutput. It knows requests by row and tokens by number; what a request
wants in the end is the head's affair, what it wants beside that the parts'. It waits for no
accelerator: what a step brings is read later, while the next one runs. (Parts and users' functions may wait.)
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain

import torch

from octavo.base import faults
from octavo.messages.step import SchedulerOutput, TokenMasks
from octavo.runtime.heads.head import Computed, Head
from octavo.runtime.sampling.output import PendingSamples
from octavo.runtime.transfer import Array
from octavo.runtime.worker.chained_steps import End
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import read_step
from octavo.runtime.worker.replayer import Replayer
from octavo.runtime.worker.request_state import RequestState
from octavo.runtime.worker.step_part import StepPart
from octavo.runtime.worker.text_lists import put_together, take_apart


class ModelRunner:
    """Runs steps in order; owns the batch state."""

    def __init__(self, cache: KVTensors, state: RequestState, head: Head, parts: Sequence[StepPart]) -> None:
        self.cache, self.state, self.head = cache, state, head
        self._parts = (*parts, head)
        self._replayer: Replayer | None = None

    def equip(self, replayer: Replayer) -> None:
        """Compute by `replayer`, which refers to the cache as allocated now."""
        self._replayer = replayer

    def warm_up(self, *, has_tried: bool = False) -> None:
        """Prepare usual steps before there are requests; else each is prepared when it comes up."""
        assert self._replayer is not None
        self._replayer.warm_up(has_tried=has_tried)

    def use_pause(self) -> bool:
        """See Replayer.use_pause."""
        return self._replayer is not None and self._replayer.use_pause()

    def strip(self) -> None:
        """Let the model go, and what was prepared to replay it."""
        self._replayer = None
        for part in self._parts:
            part.release()

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingStep:
        """Give one step to the device; without the sampling, if its masks follow."""
        assert not self.head.awaits_masks, "the step before has not been sampled"
        apart, texts = take_apart(step)
        pending = self._execute(apart)
        if texts:
            pending.closers.append(partial(put_together, request_ids=step.request_ids, names=texts))
            self._release(chain.from_iterable(texts.values()))
        return pending

    def _execute(self, step: SchedulerOutput) -> PendingStep:
        step, rows = self._update_state(step)
        work = read_step(step, rows, self.state)
        pending = PendingStep.of(step, work.owners[work.samples])
        if not rows.size:
            return pending
        for part in self._parts:
            part.begin(work)
        kind = self.head.kind(step, rows)
        replayer = self._replayer
        assert replayer is not None, "the weights have been given up"
        end: End = kind
        for part in self._parts:
            end = part.end(end)
        replay = replayer.find(work, end) if all(part.is_idle for part in self._parts) else None
        hidden = replay() if replay else replayer.compute(work, self._parts, pending)
        if isinstance(hidden, PendingSamples):
            pending.pending = hidden
        elif work.samples.size:
            faults.hit("worker.forward", rows=hidden if isinstance(hidden, torch.Tensor) else None)
            self.head.finish(step, Computed(kind, work, hidden, replayer.model), pending)
        if replay is None:
            replayer.after_eager(work, end)
        for part in self._parts:
            part.follow(step, work, hidden if isinstance(hidden, torch.Tensor) else None, pending)
        return pending

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None) -> None:
        """End the step given last, whose masks have come."""
        self.head.sample(masks)

    def _update_state(self, step: SchedulerOutput) -> tuple[SchedulerOutput, Array]:
        """Release and admit requests, bring what the step adds to the device; return the step and its rows.

        The step has lengths now that the engine could not know.
        """
        self._release(step.released_ids)
        for request in step.new_requests:
            row = self.state.add(request)
            for part in self._parts:
                part.add(row, request)
        rows = self.state.rows(step.request_ids)
        self.state.extend_tables(rows, step)
        for part in self._parts:
            step = part.settle(step, rows)
        self.state.put_ahead(rows, step)
        self.state.flush()
        self.cache.copy_blocks(step.block_copies)
        return step, rows

    def _release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            row = self.state.release(request_id)
            for part in self._parts:
                part.remove(row)
