"""`Replayer`: how steps are computed, from what was captured or recorded before or by the model's own code.

The worker makes one for its device, and the model runner asks it for every step. CUDAGraphs and RecordedCalls
replay; Eager does not.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from octavo.runtime.batch import MAX_CAPTURED_TOKENS, ForwardBatch
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.output import PendingSamples
from octavo.runtime.sampling.sampler import Kind
from octavo.runtime.worker.prepare import Work

Replay = Callable[[], Tensor | PendingSamples]
"""Computes a step: up to its tokens, which are appended to the state; or up to the last hidden states of the
requests that sample, [S, hidden_size], good until the next step.
"""


class Replayer(ABC):
    """Computes with `model`. batch_invariant: as in Platform."""

    def __init__(self, model: Model, *, batch_invariant: bool) -> None:
        self.model = model
        self._batch_invariant = batch_invariant

    @abstractmethod
    def find(self, work: Work, end: Kind | None) -> Replay | None:
        """Return what computes this step; None if the model itself has to.

        end: the kind that chooses the tokens of all requests; None = the sampler has more to do
        """

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute any batch, as Model.forward; the result is good until the next step."""
        return self.model.forward(batch)

    def may_skip_rows(self, work: Work) -> bool:
        """Return True if the last layers may leave out the tokens whose hidden states nobody reads.

        Without batch invariance that changes the bits of the others, and a captured step leaves out none.
        """
        return self._batch_invariant or bool(work.starts[-1] > MAX_CAPTURED_TOKENS)

    def warm_up(self) -> None:
        """Prepare the replays of usual steps; before there are requests."""
        return

    def after_eager(self, work: Work) -> None:
        """Prepare replays while the device computes `work`, a step that `find` had nothing for."""
        del work


class Eager(Replayer):
    """Replays nothing."""

    def find(self, work: Work, end: Kind | None) -> None:
        """See Replayer.find."""
        del work, end
