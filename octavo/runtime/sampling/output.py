"""A step's samples on their way to the host: codes, scores, and the copies that are under way.

Made by the sampler, started by the model runner when a step is given out, read when its result is asked for.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from octavo.messages.request import TokenLogprobs
from octavo.runtime.sampling.logprobs import Scores
from octavo.runtime.sampling.slots import Array

_ALL_MASKED = "No token may be chosen: the request's constraints together forbid the whole vocabulary."
_NOT_A_NUMBER = "numerics: the model's logits for this request are not finite numbers."


@dataclass(slots=True)
class HostSamples:
    """A step's result as lists, one entry per row.

    logprobs: None where not asked for; errors: a text for the client, None where all is well
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]


class Copies(Protocol):
    """Copies of some tensors on the host."""

    @property
    def is_ready(self) -> bool:
        """Whether they are complete."""

    def read(self) -> list[torch.Tensor]:
        """The copies, once they are complete; waits for no later work of the device."""


class Moment:
    """When all that has been given to the device so far will be done; on a CPU that is now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type != "cpu":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def is_over(self) -> bool:
        """Whether it has come."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until it has come, and not for what was given to the device since."""
        if self._event is not None:
            self._event.synchronize()


class HostCopies:
    """`Copies` made by the device's copy engine, without waiting for the device."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        device = tensors[0].device
        is_remote = device.type != "cpu"
        self._copies = [torch.empty_like(t, device="cpu", pin_memory=is_remote) for t in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._end = Moment(device)

    @property
    def is_ready(self) -> bool:
        """See Copies."""
        return self._end.is_over

    def read(self) -> list[torch.Tensor]:
        """See Copies."""
        self._end.wait()
        return self._copies


@dataclass(slots=True)
class SamplerOutput:
    """A step's result on the device.

    token_ids: [rows] int64; any valid id for a failed row
    peaks:     [rows] float32, each row's largest logit after the processors; not finite = the row has failed
    scores:    pairs of rows (on the host) and their scores
    faults:    by row: why it cannot go on
    """

    token_ids: torch.Tensor
    peaks: torch.Tensor
    scores: list[tuple[Array, Scores]] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)

    def send(self) -> "PendingSamples":
        """Start the copies to the host."""
        tensors = [self.token_ids, self.peaks, *(tensor for _, scores in self.scores for tensor in scores)]
        return PendingSamples(HostCopies(tensors), [rows for rows, _ in self.scores], self.faults)

    def to_host(self) -> HostSamples:
        """Lists of everything; waits for the device."""
        return self.send().read()


@dataclass(slots=True)
class PendingSamples:
    """Token ids, peaks and scores under way.

    copies:      of token ids and peaks, then of each group of scores
    scored_rows: the rows of each group
    faults:      as in SamplerOutput
    rows:        those that count, in their order; None = all
    """

    copies: Copies
    scored_rows: list[Array] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    rows: Array | None = None

    def read(self) -> HostSamples:
        """Lists of everything; waits for this step, but for none behind it."""
        ids_of_all, peaks_of_all, *columns = self.copies.read()
        rows = slice(None) if self.rows is None else self.rows
        token_ids: list[int] = ids_of_all.numpy()[rows].tolist()
        peaks = peaks_of_all.numpy()[rows]
        errors: list[str | None] = [None] * len(token_ids)
        if self.faults or not np.isfinite(peaks).all():
            errors = [self.faults.get(row) or _error(peak) for row, peak in enumerate(peaks.tolist())]
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        for index, rows in enumerate(self.scored_rows):
            scores = Scores(*columns[3 * index : 3 * index + 3])
            for row, entry in zip(rows.tolist(), scores.to_host(), strict=True):
                logprobs[row] = None if errors[row] else entry
        return HostSamples(token_ids, logprobs, errors)


def _error(peak: float) -> str | None:
    if np.isfinite(peak):
        return None
    return _ALL_MASKED if peak == -np.inf else _NOT_A_NUMBER
