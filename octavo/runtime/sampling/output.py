"""A step's samples on their way to the host: codes, scores, and the copies that are under way.

Made by the sampler, started by the model runner when a step is given out, read when its result is asked for.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from octavo.messages.request import TokenLogprobs
from octavo.runtime.kernels.sampling import Scores
from octavo.runtime.sampling.logprobs import entries
from octavo.runtime.transfer import Array

_ALL_MASKED = "No token may be chosen: the request's constraints together forbid the whole vocabulary."
_NOT_A_NUMBER = "numerics: the model's logits for this request are not finite numbers."


@dataclass(slots=True)
class HostSamples:
    """A step's result.

    token_ids: of all rows
    logprobs:  by row, where asked for and all is well
    errors:    by row: a text for the client
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]


class Copies(Protocol):
    """Copies of some tensors on the host."""

    @property
    def is_ready(self) -> bool:
        """Return True if they are complete."""

    def read(self) -> list[Array]:
        """Return the copies, once they are complete; waits for no later work of the device."""


class Moment:
    """When all that has been given to the device so far will be done; if that is the CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type != "cpu":
            kind: Any = torch.cuda.Event if device.type == "cuda" else partial(torch.Event, device)
            self._event = kind()
            self._event.record()

    @property
    def is_over(self) -> bool:
        """Return True if it has come."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until it has come, and not for what was given to the device since."""
        if self._event is not None:
            self._event.synchronize()


class HostCopies:
    """`Copies` made by the device's copy engine, without waiting for the device."""

    def __init__(self, tensors: list[torch.Tensor], order: Array | None = None) -> None:
        """order: of the rows of the copies; None = as they are"""
        self._order, device = order, tensors[0].device
        if device.type == "cpu":
            self._copies = [tensor.clone() for tensor in tensors]
        else:
            self._copies = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
        self._end = Moment(device)

    @property
    def is_ready(self) -> bool:
        """See Copies."""
        return self._end.is_over

    def read(self) -> list[Array]:
        """See Copies."""
        self._end.wait()
        found = [copy.numpy() for copy in self._copies]
        return found if self._order is None else [copy[self._order] for copy in found]


@dataclass(slots=True)
class SamplerOutput:
    """A step's result on the device.

    token_ids:  [rows] int64; any valid id for a failed row
    max_logits: [rows] float32, each row's largest after the processors; not finite = the row has failed
    scores:     pairs of rows (on the host) and their scores
    faults:     by row: why it cannot go on
    """

    token_ids: torch.Tensor
    max_logits: torch.Tensor
    scores: list[tuple[Array, Scores]] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)

    def send(self) -> "PendingSamples":
        """Start the copies to the host."""
        tensors = [
            self.token_ids,
            self.max_logits,
            *(tensor for _, scores in self.scores for tensor in scores),
        ]
        return PendingSamples(HostCopies(tensors), [rows for rows, _ in self.scores], self.faults)

    def to_host(self) -> HostSamples:
        """Return everything; waits for the device."""
        return self.send().read()


@dataclass(slots=True)
class PendingSamples:
    """Token ids, largest logits and scores under way.

    copies:      of token ids and largest logits, then of each group of scores
    scored_rows: the rows of each group
    faults:      as in SamplerOutput
    tells_drafts: a third copy is of the tokens that these rows have read, which the host does not know
    """

    copies: Copies
    scored_rows: list[Array] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    tells_drafts: bool = False
    draft_s: float = 0.0
    """Seconds that guessing behind such a step takes."""

    def read(self) -> HostSamples:
        """Return everything; waits for this step, but for none behind it."""
        token_ids, max_logits, *columns = self.copies.read()
        (failed,) = (~np.isfinite(max_logits)).nonzero()
        is_masked = max_logits == -np.inf
        errors = {row: _ALL_MASKED if is_masked[row] else _NOT_A_NUMBER for row in failed.tolist()}
        errors |= self.faults
        logprobs: dict[int, TokenLogprobs] = {}
        for index, rows in enumerate(self.scored_rows):
            scored = zip(rows.tolist(), entries(columns[3 * index : 3 * index + 3]), strict=True)
            logprobs |= {row: entry for row, entry in scored if row not in errors}
        return HostSamples(token_ids.tolist(), logprobs, errors)
