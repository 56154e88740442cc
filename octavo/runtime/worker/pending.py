"""A `PendingStep` is what a step given to the device will bring. The model runner makes it."""

from dataclasses import dataclass, field

from octavo.messages.request import TokenLogprobs
from octavo.messages.step import ModelRunnerOutput
from octavo.runtime.sampling.output import PendingSamples
from octavo.runtime.transfer import Array


@dataclass(slots=True)
class PendingStep:
    """Reads the results of a step once they are there.

    samples: indexes into `request_ids` of those that sample, ascending, as are the rows of `pending`
    """

    step_id: int
    request_ids: list[str]
    samples: Array
    pending: PendingSamples | None = None
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """Return True if `read` would not wait."""
        return self.pending is None or self.pending.copies.is_ready

    def read(self) -> ModelRunnerOutput:
        """Return everything on the host; waits for this step on the device, and for none behind it."""
        if self.pending is None:
            nothing: list[list[int]] = [[] for _ in self.request_ids]
            return ModelRunnerOutput(self.step_id, nothing, prompt_logprobs=self.prompt_logprobs)
        host, names = self.pending.read(), self.request_ids
        sampled = [[token_id] for token_id in host.token_ids]
        if len(sampled) < len(names):
            of_samples, sampled = sampled, [[] for _ in names]
            for index, token_ids in zip(self.samples.tolist(), of_samples, strict=True):
                sampled[index] = token_ids
        return ModelRunnerOutput(
            self.step_id,
            sampled,
            logprobs={names[self.samples[row]]: [scores] for row, scores in host.logprobs.items()},
            prompt_logprobs=self.prompt_logprobs,
            errors={names[self.samples[row]]: error for row, error in host.errors.items()},
        )
