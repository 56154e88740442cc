"""A `StepPart` is a feature that takes part in steps. The runner has a list, and knows none by name."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from octavo.messages.step import NewRequest, SchedulerOutput
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.models.interface import Model
from octavo.runtime.transfer import Array
from octavo.runtime.worker.chained_steps import End
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work


class StepPart(ABC):
    """Keeps what requests want of it, by row. While all parts are idle, steps may be replayed."""

    def __init__(self) -> None:
        self._wanted: dict[int, Any] = {}

    @abstractmethod
    def read(self, request: NewRequest) -> Any:
        """Return what a request that enters wants of this part; None for nothing."""

    def add(self, row: int, request: NewRequest) -> None:
        """Give `row` to a request that enters."""
        if (wanted := self.read(request)) is not None:
            self._wanted[row] = wanted

    def remove(self, row: int) -> None:
        """Forget the request of `row`, which leaves, or wants no more; it may be unknown."""
        self._wanted.pop(row, None)

    @property
    def is_idle(self) -> bool:
        """Return True if no request wants anything of this part."""
        return not self._wanted

    @property
    def is_wanted(self) -> bool:
        """Return True if any request wants something, or cannot go on."""
        return bool(self._wanted) or not self.is_idle

    def settle(self, step: SchedulerOutput, rows: Array) -> SchedulerOutput:
        """Return the step with the lengths that the engine could not know, before the state follows it."""
        return step

    def release(self) -> None:
        """Drop what refers to the model, which goes."""

    def end(self, end: End) -> End:
        """Return how a captured step ends that would end with `end`."""
        return end

    def begin(self, work: Work) -> None:
        """Note what a step computes, before anything looks for a replay of it."""

    def before(self, work: Work, batch: ForwardBatch) -> None:
        """Change the batch of a step that the model is about to compute."""

    def after(self, work: Work, hidden: Tensor, model: Model, outcome: PendingStep) -> None:
        """Add to the outcome of a step. hidden: of the batch's wanted tokens, or of all, [T, hidden_size]"""

    def follow(self, step: SchedulerOutput, work: Work, hidden: Tensor | None, outcome: PendingStep) -> None:
        """Look at a step whose tokens were chosen. hidden: of `work.samples`, [S, hidden_size], or None"""


class FalliblePart(StepPart):
    """A part that may find, when a request enters, that this cannot go on."""

    def __init__(self) -> None:
        super().__init__()
        self._failed: dict[str, str] = {}
        self._failed_rows: dict[int, str] = {}

    @property
    def has_failed(self) -> bool:
        """Return True while there are requests to end."""
        return bool(self._failed)

    def fail(self, request: NewRequest, error: str) -> None:
        """End a request that `read` looks at. error: for its client"""
        self._failed[request.request_id] = error

    def add(self, row: int, request: NewRequest) -> None:
        super().add(row, request)
        if request.request_id in self._failed:
            self._failed_rows[row] = request.request_id

    def remove(self, row: int) -> None:
        super().remove(row)
        if (request_id := self._failed_rows.pop(row, None)) is not None:
            self._failed.pop(request_id, None)

    def after(self, work: Work, hidden: Tensor, model: Model, outcome: PendingStep) -> None:
        """End those that cannot go on."""
        outcome.errors |= {name: text for name, text in self._failed.items() if name in outcome.request_ids}
