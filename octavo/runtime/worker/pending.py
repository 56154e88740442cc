"""`PendingStep`: what a step given to the device will bring. Made by the model runner, read later."""

from dataclasses import dataclass, field

from octavo.messages.request import TokenLogprobs
from octavo.messages.step import ModelRunnerOutput
from octavo.runtime.sampling.output import PendingSamples
from octavo.runtime.sampling.slots import Array


@dataclass(slots=True)
class PendingStep:
    """samples: indexes into `request_ids` of those that sample, in the order of the rows of `pending`."""

    step_id: int
    request_ids: list[str]
    samples: Array | None = None
    pending: PendingSamples | None = None
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """Whether `read` would not wait."""
        return self.pending is None or self.pending.copies.is_ready

    def read(self) -> ModelRunnerOutput:
        """Everything on the host; waits for this step on the device, and for none behind it."""
        sampled: list[list[int]] = [[] for _ in self.request_ids]
        output = ModelRunnerOutput(self.step_id, sampled, prompt_logprobs=self.prompt_logprobs)
        if self.pending is None or self.samples is None:
            return output
        host = self.pending.read()
        indexes = self.samples.tolist()
        for index, token_id in zip(indexes, host.token_ids, strict=True):
            sampled[index].append(token_id)
        if any(host.logprobs):
            scored = zip(indexes, host.logprobs, strict=True)
            output.logprobs = {self.request_ids[index]: [scores] for index, scores in scored if scores}
        if any(host.errors):
            failed = zip(indexes, host.errors, strict=True)
            output.errors = {self.request_ids[index]: error for index, error in failed if error}
        return output
