"""A `Replayer` computes steps, by what was captured or recorded before or by the model's own code.

The worker makes one for its device, and the model runner asks it for every step. CUDAGraphs, RecordedCalls
and RecordedEncoder replay; Eager does not.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from octavo.runtime.batch import MAX_CAPTURED_TOKENS, ForwardBatch
from octavo.runtime.kernels.sampling import Choice
from octavo.runtime.lora.sites import Reach
from octavo.runtime.models.interface import Model
from octavo.runtime.sampling.masks import RowMasks
from octavo.runtime.sampling.output import PendingSamples
from octavo.runtime.worker.chained_steps import End, Guesser
from octavo.runtime.worker.kv_tensors import KVTensors
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.prepare import Work, make_batch
from octavo.runtime.worker.request_state import RequestState
from octavo.runtime.worker.step_part import StepPart


@dataclass(frozen=True, slots=True)
class Unmasked:
    """A step that is computed up to its logits. `choose` ends it, once, before the next step."""

    choose: Callable[[RowMasks | None], PendingSamples]


Replay = Callable[[], Tensor | Choice | PendingSamples | Unmasked]
"""Computes a step: up to its tokens, which are appended to the state; or until masks have come; or up to the
last hidden states of the requests that sample, [S, hidden_size], or their tokens, good until the next step.
"""


class Variant(Protocol):
    """What surrounds the recording or capture of a step."""

    def __call__(self, reach: Reach) -> AbstractContextManager[None]:
        """Record in here a step for adapters of this reach."""


def one_variant(reach: Reach) -> AbstractContextManager[None]:
    """See Variant: there are no adapters."""
    return nullcontext()


class Replayer(ABC):
    """Computes steps with `model`, over the runner's cache and state. batch_invariant: as in Platform."""

    samples: ClassVar[bool] = False
    """Replays may end with tokens."""
    guess: Guesser | None = None
    """Guesses behind chained steps; None = nobody does."""

    def __init__(self, model: Model, cache: KVTensors, state: RequestState, *, batch_invariant: bool) -> None:
        self.model = model
        self._cache, self._state = cache, state
        self._batch_invariant = batch_invariant

    @abstractmethod
    def find(self, work: Work, end: End) -> Replay | None:
        """Return what computes this step; None if the model itself has to.

        end: the kind that chooses the tokens of all requests; None = the sampler has more to do
        """

    def can_chain(self, num_rows: int) -> bool:
        """Return True if steps of so many rows may end with `Chained`."""
        return False

    def compute(self, work: Work, parts: Sequence[StepPart], pending: PendingStep) -> Tensor:
        """Let the model and the parts compute a step: the last hidden states, as a `Replay` gives them.

        The last layers leave out the tokens whose hidden states nobody reads. Without batch invariance that
        changes the bits of the others, and a captured step leaves out none: there only longer ones do.
        """
        batch, last_rows = self.make_batch(work)
        if self._batch_invariant or work.starts[-1] > MAX_CAPTURED_TOKENS:
            batch.wanted = last_rows
        for part in parts:
            part.before(work, batch)
        hidden = self.forward(batch)
        for part in parts:
            part.after(work, hidden, self.model, pending)
        return hidden if batch.wanted is not None else hidden[last_rows]

    def make_batch(self, work: Work) -> tuple[ForwardBatch, Tensor]:
        """Return the batch that `forward` computes, and the last token of each request that samples, [S]."""
        return make_batch(work, self._state, self._cache)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute any batch, as Model.forward; the result is good until the next step."""
        return self.model.forward(batch)

    def warm_up(self, *, has_tried: bool = False) -> None:
        """Prepare the replays of usual steps; before there are requests.

        has_tried: such steps have been computed, over another cache
        """

    def use_pause(self) -> bool:
        """Prepare one more while there are no requests; return True if others are left."""
        return False

    def after_eager(self, work: Work, end: End) -> None:
        """Prepare replays while the device computes `work`, a step that was not replayed. end: as in find"""


class Eager(Replayer):
    """Replays nothing."""

    def find(self, work: Work, end: End) -> None:
        return None
