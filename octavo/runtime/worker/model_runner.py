"""One step on one rank: release and admit slots, prepare, forward, head, sample, tell.

Called by Worker for every SchedulerOutput. Knows requests by slot and tokens by number; what a request wants
of its tokens is the sampler's affair.
"""

import torch

from octavo.messages.request import TokenLogprobs
from octavo.messages.step import ModelRunnerOutput, SchedulerOutput
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.sampler import Sampler
from octavo.runtime.sampling.slots import to_device
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.prepare import PreparedStep, prepare
from octavo.runtime.worker.prompt_scores import PromptScores
from octavo.runtime.worker.request_state import RequestState


class ModelRunner:
    """Runs steps in order; owns the batch state."""

    def __init__(
        self,
        model: Model,
        cache: KVTensors,
        state: RequestState,
        sampler: Sampler,
        logprobs_mode: str,
    ) -> None:
        self.model = model
        """Deleted while the weights are given up."""
        self._cache = cache
        self._state = state
        self._sampler = sampler
        self._prompt_scores = PromptScores(logprobs_mode)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; the output's lists run parallel to `step.request_ids`."""
        self._update_slots(step)
        if not step.request_ids:
            return ModelRunnerOutput(step.step_id, [])
        slots = self._state.slots(step.request_ids)
        self._state.extend_tables(slots, step)
        self._cache.copy_blocks(step.block_copies)
        prepared = prepare(step, slots, self._state, self._cache)
        hidden = self.model.forward(prepared.batch)
        prompt_logprobs = self._prompt_scores.collect(step, prepared, self._state, hidden, self.model)
        return self._sample(step, prepared, hidden, prompt_logprobs)

    def _update_slots(self, step: SchedulerOutput) -> None:
        for request_id in step.released_ids:
            slot = self._state.release(request_id)
            self._sampler.remove(slot)
            self._prompt_scores.remove(slot)
        for request in step.new_requests:
            slot = self._state.add(request)
            self._sampler.add(slot, request)
            self._prompt_scores.add(slot, request)

    def _sample(
        self,
        step: SchedulerOutput,
        prepared: PreparedStep,
        hidden: torch.Tensor,
        prompt_logprobs: dict[str, list[TokenLogprobs]],
    ) -> ModelRunnerOutput:
        sampled: list[list[int]] = [[] for _ in step.request_ids]
        output = ModelRunnerOutput(step.step_id, sampled, prompt_logprobs=prompt_logprobs)
        if prepared.samples.size == 0:
            return output
        slots = prepared.slots[prepared.samples]
        last_rows = to_device(prepared.starts[prepared.samples + 1] - 1, hidden.device)
        positions = self._state.num_tokens[slots] - self._state.num_prompt_tokens[slots]
        result = self._sampler.sample(self.model.logits(hidden[last_rows]), slots, positions)
        self._state.append(slots, result.token_ids)
        host = result.to_host()
        for row, index in enumerate(prepared.samples.tolist()):
            request_id = step.request_ids[index]
            sampled[index] = [host.token_ids[row]]
            if (scores := host.logprobs[row]) is not None:
                output.logprobs[request_id] = [scores]
            if (error := host.errors[row]) is not None:
                output.errors[request_id] = error
        return output
