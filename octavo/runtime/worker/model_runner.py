"""One step on one rank: update the batch, replay or compute, sample, send.

A step whose masks follow is computed up to the logits, and ended by `sample`.

Called by Worker for every SchedulerOutput. Knows requests by row and tokens by number; what a request wants
of its tokens is the sampler's affair, what it wants beside them that of the parts. Waits for no accelerator:
what a step brings is read later, while the next one runs. (Parts and users' functions may wait.)
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from octavo.base import faults
from octavo.messages.step import SchedulerOutput, TokenMasks
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.masks import RowMasks
from octavo.runtime.sampling.output import PendingSamples, SamplerOutput
from octavo.runtime.sampling.sampler import Kind, Sampler
from octavo.runtime.transfer import Array
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work, make_batch, read_step
from octavo.runtime.worker.replayer import Replayer
from octavo.runtime.worker.request_state import RequestState
from octavo.runtime.worker.step_part import StepPart


class _Unsampled(NamedTuple):
    """A step on its way. logits: [S, vocab_size] of the requests that sample."""

    pending: PendingStep
    work: Work
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

    @property
    def replayer(self) -> Replayer:
        """Return the replayer; the weights must be there."""
        assert self._replayer is not None, "the weights have been given up"
        return self._replayer

    @property
    def model(self) -> Model:
        """Return the model that steps are computed with."""
        return self.replayer.model

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingStep:
        """Give one step to the device; without the sampling, if its masks follow."""
        assert self._unsampled is None, "the step before has not been sampled"
        rows = self._update_state(step)
        if not step.request_ids:
            return PendingStep(step.step_id, [])
        work = read_step(step, rows, self.state)
        pending = PendingStep(step.step_id, step.request_ids, work.samples)
        may_replay = all(part.is_idle for part in self._parts)
        replay = self.replayer.find(work, self._plain_kind(step, rows)) if may_replay else None
        if replay is None:
            self._end(step, work, self._compute(work, pending), pending)
            self.replayer.after_eager(work)
        elif isinstance(found := replay(), PendingSamples):
            pending.pending = found
        else:
            self._end(step, work, found, pending)
        return pending

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None) -> None:
        """End the step given last: choose its tokens, and send them to the host."""
        assert self._unsampled is not None, "there is no step to sample"
        (pending, work, logits), self._unsampled = self._unsampled, None
        rows = work.rows[work.samples]
        positions = self.state.num_tokens[rows] - self.state.num_prompt_tokens[rows]
        samples = self.sampler.sample(logits, rows, positions, RowMasks.read(masks, work.samples))
        self._send(pending, rows, samples)

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

    def _plain_kind(self, step: SchedulerOutput, rows: Array) -> Kind | None:
        """Return the kind that chooses the tokens of all these rows; None if masks or processors do."""
        is_masked = step.masks_follow or step.token_masks is not None
        return None if is_masked else self.sampler.plain_kind(rows)

    def _compute(self, work: Work, pending: PendingStep) -> torch.Tensor:
        """Let the model compute the step; return the last hidden states of those that sample, [S, size]."""
        batch, last_rows = make_batch(work, self.state, self.cache)
        if self.replayer.may_skip_rows(work):
            batch.wanted = last_rows
        for part in self._parts:
            part.before(work, batch)
        hidden = self.replayer.forward(batch)
        for part in self._parts:
            part.after(work, hidden, self.model, pending)
        return hidden if batch.wanted is not None else hidden[last_rows]

    def _end(self, step: SchedulerOutput, work: Work, hidden: torch.Tensor, pending: PendingStep) -> None:
        """Sample from the last hidden states, [S, hidden_size], of those that do; later, if masks follow."""
        if not work.samples.size:
            return
        faults.hit("worker.forward", rows=hidden)
        rows = work.rows[work.samples]
        if self._plain_kind(step, rows) is Kind.GREEDY and (found := self.model.greedy(hidden)):
            self._send(pending, rows, SamplerOutput(*found))
            return
        self._unsampled = _Unsampled(pending, work, self.model.logits(hidden))
        if not step.masks_follow:
            self.sample(step.token_masks)

    def _send(self, pending: PendingStep, rows: Array, samples: SamplerOutput) -> None:
        self.state.append(rows, samples.token_ids)
        pending.pending = samples.send()
