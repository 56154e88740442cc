"""A `Head` ends steps: it makes results of the last hidden states. The model runner has one."""

from typing import NamedTuple

from torch import Tensor

from octavo.messages.step import SchedulerOutput, TokenMasks
from octavo.runtime.kernels.sampling import Choice
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.sampler import Kind, Masked
from octavo.runtime.transfer import Array
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work
from octavo.runtime.worker.replayer import Unmasked
from octavo.runtime.worker.step_part import StepPart


class Computed(NamedTuple):
    """A step up to its last hidden states. kind: of `Head.kind`; hidden: as replayed, of `work.samples`"""

    kind: Kind | Masked | None
    work: Work
    hidden: Tensor | Choice | Unmasked
    model: Model


class Head(StepPart):
    """Knows by row what requests want in the end."""

    def kind(self, step: SchedulerOutput, rows: Array) -> Kind | Masked | None:
        """Return the kind that chooses the tokens of all rows; None if a replay cannot end the step."""
        return None

    def finish(self, step: SchedulerOutput, computed: Computed, pending: PendingStep) -> None:
        """End a step, unless a replay has."""

    @property
    def awaits_masks(self) -> bool:
        """Return True if the last step is still to be ended, by `sample`."""
        return False

    def sample(self, masks: TokenMasks | None) -> None:
        """End the step that waits for masks."""
        raise AssertionError("there is no step to sample")
