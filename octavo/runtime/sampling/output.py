"""A step's samples on their way to the host: codes, scores, and the copies that are under way.

Made by the sampler, started by the model runner when a step is given out, read when its result is asked for.
"""

from dataclasses import dataclass, field

import torch

from octavo.messages.request import TokenLogprobs
from octavo.runtime.sampling.draw import Choice
from octavo.runtime.sampling.logprobs import Scores
from octavo.runtime.sampling.slots import Array

_ALL_MASKED, _NOT_A_NUMBER = -1, -2
_TEXTS = {
    _ALL_MASKED: "No token may be chosen: the request's constraints together forbid the whole vocabulary.",
    _NOT_A_NUMBER: "numerics: the model's logits for this request are not finite numbers.",
}


def encode(choice: Choice) -> torch.Tensor:
    """One number per row, [rows] int64: the token, or below 0 why there is none."""
    token_ids, peaks = choice
    fault = torch.where(peaks == float("-inf"), _ALL_MASKED, _NOT_A_NUMBER)
    return torch.where(peaks.isfinite(), token_ids, fault)


@dataclass(slots=True)
class HostSamples:
    """A step's result as lists, one entry per row.

    logprobs: None where not asked for; errors: a text for the client, None where all is well
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]


class HostCopies:
    """Copies of some tensors on the host; made at once, without waiting for the device."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        is_remote = tensors[0].device.type != "cpu"
        self._copies = [torch.empty_like(t, device="cpu", pin_memory=is_remote) for t in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        if is_remote:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[torch.Tensor]:
        """The copies, once they are complete; waits for no later work of the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


@dataclass(slots=True)
class SamplerOutput:
    """A step's result on the device.

    codes:  [rows] int64, as `encode` makes them
    scores: pairs of rows (on the host) and their scores
    faults: by row: why it cannot go on
    rows:   those of `codes` that count, in their order; None = all
    """

    codes: torch.Tensor
    scores: list[tuple[Array, Scores]] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    rows: Array | None = None

    @property
    def token_ids(self) -> torch.Tensor:
        """[rows] int64; 0 for a failed row."""
        return self.codes.clamp(min=0)

    def send(self) -> "PendingSamples":
        """Start the copies to the host."""
        tensors = [self.codes, *(tensor for _, scores in self.scores for tensor in scores)]
        return PendingSamples(HostCopies(tensors), [rows for rows, _ in self.scores], self.faults, self.rows)

    def to_host(self) -> HostSamples:
        """Lists of everything; waits for the device."""
        return self.send().read()


@dataclass(slots=True)
class PendingSamples:
    """What `SamplerOutput.send` started. scored_rows: the rows of each group of scores."""

    copies: HostCopies
    scored_rows: list[Array]
    faults: dict[int, str]
    rows: Array | None

    def read(self) -> HostSamples:
        """Lists of everything; waits for this step, but for none behind it."""
        codes, *columns = self.copies.read()
        token_ids: list[int] = (codes if self.rows is None else codes.numpy()[self.rows]).tolist()
        errors: list[str | None] = [None] * len(token_ids)
        if self.faults or min(token_ids, default=0) < 0:
            errors = [self.faults.get(row) or _TEXTS.get(code) for row, code in enumerate(token_ids)]
            token_ids = [max(0, code) for code in token_ids]
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        for index, rows in enumerate(self.scored_rows):
            scores = Scores(*columns[3 * index : 3 * index + 3])
            for row, entry in zip(rows.tolist(), scores.to_host(), strict=True):
                logprobs[row] = None if errors[row] else entry
        return HostSamples(token_ids, logprobs, errors)
