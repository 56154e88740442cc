"""`ModelRunner` gives one step to one rank: it updates the batch, has the step computed, samples, and sends.

A step whose masks follow is computed up to the logits, and ended by `sample`.

The worker calls it for every SchedulerOutput. It knows requests by row and tokens by number; what a request
wants of its tokens is the sampler's affair, what it wants beside them that of the parts. It waits for no
accelerator: what a step brings is read later, while the next one runs. (Parts and users' functions may wait.)
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from octavo.base import faults
from octavo.messages.step import SchedulerOutput, TokenMasks
from octavo.runtime.sampling.masks import RowMasks
from octavo.runtime.sampling.output import PendingSamples, SamplerOutput
from octavo.runtime.sampling.sampler import Kind, Sampler
from octavo.runtime.transfer import Array
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import read_step
from octavo.runtime.worker.replayer import Replayer
from octavo.runtime.worker.request_state import RequestState
from octavo.runtime.worker.step_part import StepPart


class _Unsampled(NamedTuple):
    """Waits for its tokens to be chosen. rows: [S] of the requests that sample; logits: theirs"""

    pending: PendingStep
    rows: Array
    logits: torch.Tensor


class ModelRunner:
    """Runs steps in order; owns the batch state."""

    def __init__(
        self, cache: KVTensors, state: RequestState, sampler: Sampler, parts: Sequence[StepPart]
    ) -> None:
        self.cache, self.state, self.sampler = cache, state, sampler
        self._parts = parts
        self._replayer: Replayer | None = None
        self._unsampled: _Unsampled | None = None

    def equip(self, replayer: Replayer) -> None:
        """Compute by `replayer`, which refers to the cache as allocated now."""
        self._replayer = replayer
        replayer.warm_up()

    def strip(self) -> None:
        """Let the model go, and what was prepared to replay it."""
        self._replayer = None

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingStep:
        """Give one step to the device; without the sampling, if its masks follow."""
        assert self._unsampled is None, "the step before has not been sampled"
        rows = self._update_state(step)
        work = read_step(step, rows, self.state)
        pending = PendingStep(step.step_id, step.request_ids, work.samples)
        if not rows.size:
            return pending
        is_masked = step.masks_follow or step.token_masks is not None
        kind = None if is_masked else self.sampler.plain_kind(rows)
        replayer = self._replayer
        assert replayer is not None, "the weights have been given up"
        replay = replayer.find(work, kind) if all(part.is_idle for part in self._parts) else None
        hidden = replay() if replay else replayer.compute(work, self._parts, pending)
        if isinstance(hidden, PendingSamples):
            pending.pending = hidden
        elif work.samples.size:
            faults.hit("worker.forward", rows=hidden)
            rows, model = rows[work.samples], replayer.model
            if kind is Kind.GREEDY and (found := model.greedy(hidden)):
                self._send(pending, rows, SamplerOutput(*found))
            else:
                self._unsampled = _Unsampled(pending, rows, model.logits(hidden))
                if not step.masks_follow:
                    self.sample(step.token_masks)
        if replay is None:
            replayer.after_eager(work, kind)
        return pending

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None) -> None:
        """End the step given last: choose its tokens, and send them to the host."""
        assert self._unsampled is not None, "there is no step to sample"
        (pending, rows, logits), self._unsampled = self._unsampled, None
        positions = self.state.num_tokens[rows] - self.state.num_prompt_tokens[rows]
        samples = self.sampler.sample(logits, rows, positions, RowMasks.read(masks, pending.samples))
        self._send(pending, rows, samples)

    def _send(self, pending: PendingStep, rows: Array, samples: SamplerOutput) -> None:
        self.state.append(rows, samples.token_ids)
        pending.pending = samples.send()

    def _update_state(self, step: SchedulerOutput) -> Array:
        """Release and admit requests, bring what the step adds to the device; return the rows of the step."""
        for request_id in step.released_ids:
            row = self.state.release(request_id)
            self.sampler.remove(row)
            for part in self._parts:
                part.remove(row)
        for request in step.new_requests:
            row = self.state.add(request)
            self.sampler.add(row, request)
            for part in self._parts:
                part.add(row, request)
        rows = self.state.rows(step.request_ids)
        self.state.extend_tables(rows, step)
        self.state.flush()
        self.cache.copy_blocks(step.block_copies)
        return rows
