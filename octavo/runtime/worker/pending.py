"""A `PendingStep` is what a step given to the device will bring. The model runner makes it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from octavo.messages.pooling import Pooled
from octavo.messages.request import TokenLogprobs
from octavo.messages.step import ModelRunnerOutput, SchedulerOutput
from octavo.runtime.sampling.output import Copies, HostSamples, PendingSamples
from octavo.runtime.transfer import Array

_NOT_FINITE = "The model's result is not finite: its weights or its precision do not suit this input."


@dataclass(slots=True)
class PendingVectors:
    """What was pooled of some requests, a row of the only copy for each."""

    request_ids: list[str]
    copies: Copies


@dataclass(slots=True)
class PendingStep:
    """Reads the results of a step once they are there.

    samples: indexes into `request_ids` of those that sample, ascending, as are the rows of `pending`; of a
             request whose drafts are verified, one for its token and one for each draft
    drafts:  as in SchedulerOutput
    """

    step_id: int
    request_ids: list[str]
    samples: Array
    drafts: dict[int, list[int]] = field(default_factory=dict)
    num_taken: dict[int, int] = field(default_factory=dict)
    """As in SchedulerOutput."""
    given: Copies | None = None
    """Of the tokens that the rows of `pending` have computed, where drafts are UNTOLD."""
    pending: PendingSamples | None = None
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[str, Pooled] = field(default_factory=dict)
    vectors: list[PendingVectors] = field(default_factory=list)
    """Become part of `pooled` once they are here."""
    errors: dict[str, str] = field(default_factory=dict)
    closers: list[Callable[[ModelRunnerOutput], None]] = field(default_factory=list)
    """What adds to the result once it is read."""
    result: ModelRunnerOutput | None = None
    """Once it was read."""

    @classmethod
    def of(cls, step: SchedulerOutput, samples: Array) -> "PendingStep":
        """Return what `step` will bring; samples: as above."""
        return cls(step.step_id, step.request_ids, samples, step.drafts, step.num_taken)

    @property
    def is_ready(self) -> bool:
        """Return True if `read` would not wait."""
        if self.result is not None:
            return True
        if self.pending is not None and not self.pending.copies.is_ready:
            return False
        return all(vectors.copies.is_ready for vectors in self.vectors)

    def read(self) -> ModelRunnerOutput:
        """Return everything on the host; waits for this step on the device, and for none behind it."""
        if self.result is None:
            self.result = self._read()
            self.result.draft_s = 0.0 if self.pending is None else self.pending.draft_s
            for close in self.closers:
                close(self.result)
        return self.result

    def _read(self) -> ModelRunnerOutput:
        for vectors in self.vectors:
            self._take(vectors)
        if self.pending is None:
            nothing: list[list[int]] = [[] for _ in self.request_ids]
            scores, errors = self.prompt_logprobs, self.errors
            return ModelRunnerOutput(self.step_id, nothing, {}, scores, errors, self.pooled)
        host, names = self.pending.read(), self.request_ids
        if (expected := self.expected()) is not None:
            return self._read_accepted(host, expected)
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
            pooled=self.pooled,
            errors=self.errors | {names[self.samples[row]]: error for row, error in host.errors.items()},
        )

    def _take(self, vectors: PendingVectors) -> None:
        """Keep the results, and why those that are not finite are none."""
        (host,) = vectors.copies.read()
        finite = np.isfinite(host).all(axis=tuple(range(1, host.ndim))).tolist()
        for request_id, result, is_finite in zip(vectors.request_ids, host, finite, strict=True):
            self.pooled[request_id] = Pooled(result.tobytes(), list(result.shape))
            if not is_finite:
                self.errors[request_id] = _NOT_FINITE

    def expected(self) -> Array | None:
        """Return the draft behind each row of `pending`, [S] int64, -1 for none; None without drafts.

        Waits for the device where only that knows them.
        """
        if not self.drafts:
            return None
        expected = np.full(len(self.samples), -1, np.int64)
        pending = self.pending
        if given := pending.copies if pending is not None and pending.tells_drafts else self.given:
            (before,) = (self.samples[1:] == self.samples[:-1]).nonzero()
            expected[before] = given.read()[-1][before + 1]
            return expected
        owners, counts = np.unique(self.samples, return_counts=True)
        ends = counts.cumsum()
        for owner, start, end in zip(owners.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
            expected[start : end - 1] = self.drafts.get(owner, [])
        return expected

    def _read_accepted(self, host: HostSamples, expected: Array) -> ModelRunnerOutput:
        """Return of each request the drafts that are what was sampled there, and what was sampled behind."""
        result = ModelRunnerOutput(
            self.step_id,
            [[] for _ in self.request_ids],
            prompt_logprobs=self.prompt_logprobs,
            pooled=self.pooled,
            errors=self.errors.copy(),
            num_drafts=np.bincount(self.samples[expected >= 0], minlength=len(self.request_ids)).tolist(),
        )
        ended = -1
        for row, draft in enumerate(expected.tolist()):
            owner, token_id = int(self.samples[row]), host.token_ids[row]
            is_true = token_id == draft
            if draft >= 0 and owner in self.num_taken:
                # What stands behind a wrong draft may not have been sampled.
                is_taken = len(result.sampled_token_ids[owner]) < self.num_taken[owner]
                is_true = is_taken and host.token_ids[row + 1] >= 0
                token_id = draft if is_true else token_id
            is_broken = row in host.errors and result.sampled_token_ids[owner]
            if owner == ended or token_id < 0 or is_broken:
                ended = owner  # what fails behind a draft fails again without it
                continue
            name = self.request_ids[owner]
            result.sampled_token_ids[owner].append(token_id)
            if row in host.logprobs:
                result.logprobs.setdefault(name, []).append(host.logprobs[row])
            if row in host.errors:
                result.errors[name] = host.errors[row]
            if not is_true:
                ended = owner
        return result
