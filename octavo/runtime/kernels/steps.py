"""The step family: both ends of a recorded step, and the recording of calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from octavo.runtime.kernels.chained import ChainKernels

T = TypeVar("T")


class StepRing(NamedTuple):
    """What host and device tell each other of recorded steps, whose rows they use in turn.

    given:      [length, most numbers] int64, written by the host before a step
    token_ids:  [length, most rows] int64, read by the host after it; as are
    max_logits: [length, most rows] float32
    begun:      [1] int64 on the device: how many steps have begun; the others may be the host's memory
    masks:      [length, most rows] int64, written by the host before a step's tokens are chosen: numbers of
                masks, -1 = none
    drafts:     [length, most rows] int64, read by the host after a chained step: what its rows read
    """

    given: Tensor
    token_ids: Tensor
    max_logits: Tensor
    begun: Tensor
    masks: Tensor
    drafts: Tensor


class BeginStep(Protocol):
    """The first kernel of a recorded step."""

    def __call__(
        self,
        ring: StepRing,
        numbers: Tensor,
        kept_ids: Tensor,
        kept_tables: Tensor,
        ids: Tensor,
        tables: Tensor,
    ) -> None:
        """Count the step, copy what its row of the ring holds, and look up what that names.

        numbers:     [n] int64, written: places [T] in kept_ids, rows [R], and whatever else is given
        kept_ids:    [any] int64
        kept_tables: [groups, rows of the batch, max_blocks] int32, contiguous
        ids:         [T] int64, written: kept_ids at the places, 0 for a draft that is none, -1
        tables:      [groups, R, max_blocks] int32, contiguous, written: kept_tables at the rows
        """


class MaskStep(Protocol):
    """Between both ends of a step that waits for masks."""

    def __call__(self, ring: StepRing, logits: Tensor, words: Tensor) -> None:
        """Set the logits to -inf whose bits are not set in the mask of their row; in place.

        logits: [n, vocab_size] of any floating-point type, contiguous rows
        words:  as in sampling.Forbid
        """


class EndStep(Protocol):
    """The last kernel of a recorded step."""

    def __call__(
        self,
        ring: StepRing,
        token_ids: Tensor,
        max_logits: Tensor,
        targets: Tensor,
        kept_ids: Tensor,
        vocab_size: int,
        drafts: Tensor,
    ) -> None:
        """Tell the host what was chosen, and keep it for the next step.

        token_ids, max_logits: [n] int64 and float32, from `Choose`; an id that is none becomes the nearest
        targets:               [n] int64, places in kept_ids to write to; equal ones get one of their ids
        drafts:                [n] int64, to be told, too; or [0]
        """


class RecordCalls(Protocol):
    """Records work that calls these kernels on the same memory every time."""

    def __call__(self, work: Callable[..., T], *lengths: tuple[int, int]) -> Callable[..., T] | None:
        """Return what repeats the work, and returns what it returned; None if it computes by other means.

        Nothing is computed while it is recorded. Recordings share memory: what a repetition leaves in tensors
        that the work made is good until the next repetition.

        lengths: two values of each number that work and repetition take, the second the largest; kernels may
                 be given these numbers, but none that are made of them
        """


@dataclass(frozen=True)
class StepKernels:
    """The kernels around a step."""

    begin: BeginStep
    mask: MaskStep
    end: EndStep
    chain: ChainKernels
    record_calls: RecordCalls | None = None
    """Only where calling a kernel costs as much as a small kernel itself."""
