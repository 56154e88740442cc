"""`PinnedRing`: the host's side of `StepRing`, the memory that captured steps share with the host.

A captured step reads its numbers and leaves its tokens by itself, and always at the same addresses. So these
hold a few rows that steps use in turn, by a count that each of them adds to: the host writes a row while the
step before is under way. A row is written again when its step has been read. Used by `CUDAGraphs`.
"""

import torch

from octavo.runtime.kernels.steps import StepRing
from octavo.runtime.sampling.output import Moment
from octavo.runtime.transfer import Array

_LENGTH = 4  # one more than steps are in flight, and one for good measure: nobody ever waits


class PinnedRing:
    """Holds as many numbers and rows as any step has, several times over."""

    def __init__(self, most_numbers: int, most_rows: int, device: torch.device) -> None:
        self._device, is_remote = device, device.type != "cpu"
        self.shared = StepRing(
            torch.zeros((_LENGTH, most_numbers), dtype=torch.int64, pin_memory=is_remote),
            torch.zeros((_LENGTH, most_rows), dtype=torch.int64, pin_memory=is_remote),
            torch.zeros((_LENGTH, most_rows), pin_memory=is_remote),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.full((_LENGTH, most_rows), -1, pin_memory=is_remote),
            torch.zeros((_LENGTH, most_rows), dtype=torch.int64, pin_memory=is_remote),
        )
        self._given, *left = (part.numpy() for part in self.shared[:3])
        self._left = *left, self.shared.drafts.numpy()
        self._masks = self.shared.masks.numpy()
        self._results: list[RingResults | None] = [None] * _LENGTH
        self._index = 0

    def restart(self) -> None:
        """Count from 0 again: the device may have left steps out."""
        self.shared.begun.zero_()
        self._index = 0

    def give(self, number: int) -> Array:
        """Return [number] int64 zeros, to be filled before the next step is launched."""
        if (last := self._results[self._index]) is not None:
            last.read()
        given = self._given[self._index, :number]
        given[:] = 0
        return given

    def give_masks(self, rows: Array, numbers: Array) -> None:
        """Give rows of the step launched last their masks, before its tokens are chosen."""
        self._masks[self._index] = -1
        self._masks[self._index, rows] = numbers

    def end(self, rows: Array) -> "RingResults":
        """Return what the step just launched will bring for these rows, in this order."""
        left = [part[self._index] for part in self._left]
        results = RingResults(left, rows, Moment(self._device))
        self._results[self._index], self._index = results, (self._index + 1) % _LENGTH
        return results


class RingResults:
    """`sampling.output.Copies` of a step's ids, max_logits and drafts, left in the host's memory."""

    def __init__(self, shared: list[Array], rows: Array, end: Moment) -> None:
        self._shared, self._rows, self._end = shared, rows, end
        self._copies: list[Array] = []

    @property
    def is_ready(self) -> bool:
        """See Copies."""
        return self._end.is_over

    def read(self) -> list[Array]:
        """See Copies."""
        if not self._copies:
            self._end.wait()
            self._copies = [part[self._rows] for part in self._shared]  # an array as index copies
        return self._copies
