"""One step on one rank: release and admit slots, prepare, forward, head, sample, send.

A step whose masks follow is computed up to the logits, and ended by `sample`.

Called by Worker for every SchedulerOutput. Knows requests by slot and tokens by number; what a request wants
of its tokens is the sampler's affair. Waits for no accelerator: what a step brings is read later, while the
next one runs. (Prompt logprobs and users' functions do wait: they need values on the host.)
"""

from typing import NamedTuple

import torch

from octavo.base import faults
from octavo.messages.step import SchedulerOutput, TokenMasks
from octavo.runtime.batch import MOST_RECORDED
from octavo.runtime.kernels.table import RecordTape, StepEnds
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import Record
from octavo.runtime.sampling.masks import RowMasks
from octavo.runtime.sampling.output import SamplerOutput
from octavo.runtime.sampling.sampler import Kind, Sampler
from octavo.runtime.transfer import Array
from octavo.runtime.worker.cuda_graphs import CUDAGraphs, Shape
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work, make_batch, read_step
from octavo.runtime.worker.prompt_scores import PromptScores
from octavo.runtime.worker.recorded_calls import RecordedCalls
from octavo.runtime.worker.request_state import RequestState


class _Unsampled(NamedTuple):
    """A step on its way. logits: [S, vocab_size] of the requests that sample."""

    pending: PendingStep
    work: Work
    logits: torch.Tensor


class ModelRunner:
    """Runs steps in order; owns the batch state."""

    def __init__(
        self,
        cache: KVTensors,
        state: RequestState,
        sampler: Sampler,
        logprobs_mode: str,
        step_ends: StepEnds,
    ) -> None:
        self._cache = cache
        self._state = state
        self._sampler = sampler
        self._step_ends = step_ends
        self._prompt_scores = PromptScores(logprobs_mode)
        self._model: Model | None = None
        self._cuda_graphs: CUDAGraphs | None = None
        self._recorded_calls: RecordedCalls | None = None
        self._unsampled: _Unsampled | None = None

    def equip(self, model: Model, record: Record | None, record_tape: RecordTape | None = None) -> None:
        """Compute with `model` and the cache as allocated now; with one of the others, steps are recorded."""
        self.strip()
        self._model = model
        if record_tape is not None:
            self._recorded_calls = RecordedCalls(model, self._cache, self._state, record_tape)
        if record is not None:
            self._cuda_graphs = self._steps(model, record)
            self._cuda_graphs.warm_up()

    def try_out(self, model: Model) -> None:
        """Compute steps of nothing with `model`: between them they use the kernels of most steps to come."""
        self._steps(model, lambda work: work).try_out()

    def _steps(self, model: Model, record: Record) -> CUDAGraphs:
        return CUDAGraphs(model, self._cache, self._state, self._sampler, self._step_ends, record)

    def strip(self) -> None:
        """Let the model go, and what was recorded of it."""
        self._model = self._cuda_graphs = self._recorded_calls = None

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingStep:
        """Give one step to the device; without the sampling, if its masks follow."""
        assert self._unsampled is None, "the step before has not been sampled"
        self._update_slots(step)
        slots = self._state.slots(step.request_ids)
        self._state.extend_tables(slots, step)
        self._state.flush()
        self._cache.copy_blocks(step.block_copies)
        if not step.request_ids:
            return PendingStep(step.step_id, [])
        work = read_step(step, slots, self._state)
        if self._is_simple:
            steps, taped = self._cuda_graphs, self._recorded_calls
            if steps is not None and (shape := steps.shape_of(work)) is not None:
                return self._repeat(steps, step, work, shape)
            if taped is not None and (size := taped.size_of(work)) is not None:
                return self._end(step, work, taped.forward(work, size))
        return self._compute(step, work)

    @property
    def model(self) -> Model:
        """What the runner computes with."""
        assert self._model is not None, "the weights have been given up"
        return self._model

    @property
    def _is_simple(self) -> bool:
        """Whether nothing needs more of a step than its ids, and the last hidden states."""
        return self._prompt_scores.is_idle and not self._state.prompt_embeds

    def _update_slots(self, step: SchedulerOutput) -> None:
        for request_id in step.released_ids:
            slot = self._state.release(request_id)
            self._sampler.remove(slot)
            self._prompt_scores.remove(slot)
        for request in step.new_requests:
            slot = self._state.add(request)
            self._sampler.add(slot, request)
            self._prompt_scores.add(slot, request)

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None) -> None:
        """End the step given last: choose its tokens, and send them to the host."""
        assert self._unsampled is not None, "there is no step to sample"
        (pending, work, logits), self._unsampled = self._unsampled, None
        slots = work.slots[work.samples]
        positions = self._state.num_tokens[slots] - self._state.num_prompt_tokens[slots]
        samples = self._sampler.sample(logits, slots, positions, RowMasks.read(masks, work.samples))
        self._send(pending, slots, samples)

    def _send(self, pending: PendingStep, slots: Array, samples: SamplerOutput) -> None:
        self._state.append(slots, samples.token_ids)
        pending.pending = samples.send()

    def _repeat(self, steps: CUDAGraphs, step: SchedulerOutput, work: Work, shape: Shape) -> PendingStep:
        kind = self._plain_kind(step, work.slots)
        if kind is None:
            return self._end(step, work, steps.forward(work, shape))
        return PendingStep(step.step_id, step.request_ids, work.samples, steps.sample(work, shape, kind))

    def _plain_kind(self, step: SchedulerOutput, slots: Array) -> Kind | None:
        """By what the tokens of these slots are chosen, if not by masks nor anything else of their own."""
        is_masked = step.masks_follow or step.token_masks is not None
        return None if is_masked else self._sampler.plain_kind(slots)

    def _compute(self, step: SchedulerOutput, work: Work) -> PendingStep:
        batch, last_rows = make_batch(work, self._state, self._cache)
        # On a GPU the rows of a product depend on how many there are, and recorded steps compute all.
        is_cpu = self._state.host_tokens is not None
        if self._prompt_scores.is_idle and (is_cpu or work.starts[-1] > MOST_RECORDED):
            batch.wanted = last_rows
        taped = self._recorded_calls
        hidden = self.model.forward(batch) if taped is None else taped.forward_once(batch)
        scores = self._prompt_scores.collect(step, work, self._state, hidden, self.model)
        pending = self._end(step, work, hidden if batch.wanted is not None else hidden[last_rows])
        pending.prompt_logprobs = scores
        if self._cuda_graphs is not None:
            self._cuda_graphs.record_behind(work)
        return pending

    def _end(self, step: SchedulerOutput, work: Work, hidden: torch.Tensor) -> PendingStep:
        """Sample from the last hidden states, [S, hidden_size], of those that do; later, if masks follow."""
        pending = PendingStep(step.step_id, step.request_ids, work.samples)
        if not work.samples.size:
            return pending
        faults.hit("worker.forward", rows=hidden)
        slots = work.slots[work.samples]
        if self._plain_kind(step, slots) is Kind.LIKELIEST and (found := self.model.likeliest(hidden)):
            self._send(pending, slots, SamplerOutput(*found))
            return pending
        logits = self.model.logits(hidden)
        self._unsampled = _Unsampled(pending, work, logits)
        if not step.masks_follow:
            self.sample(step.token_masks)
        return pending
