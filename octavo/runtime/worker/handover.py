"""A `Handover` is what a captured step of one stage takes from the stage before and leaves for the next.

Graphs compute over memory that stays put; what travels beside them are the tokens of the step alone, in their
order, as eager steps send them: neighbouring stages need not replay the same steps.
"""

import torch
from torch import Tensor

from octavo.runtime.distributed.group import Group
from octavo.runtime.models.interface import Model
from octavo.runtime.transfer import Array, to_device


class Handover:
    """Keeps what stages hand over of up to `most_tokens` tokens; of one stage, nothing."""

    def __init__(self, model: Model, pipeline: Group, most_tokens: int, device: torch.device) -> None:
        self._pipeline = pipeline
        *sizes, dtype = model.boundary or (0, 0, torch.float32)
        count = most_tokens if pipeline.size > 1 else 0
        self._entering, self.leaving = (
            torch.zeros((count, size), dtype=dtype, device=device) for size in sizes
        )

    @property
    def is_alone(self) -> bool:
        """Return True if there are no other stages."""
        return self._pipeline.size == 1

    def entered(self, num_tokens: int) -> Tensor | None:
        """Return where the stage's input stands, [num_tokens, size]; None in the only stage."""
        return None if self._pipeline.size == 1 else self._entering[:num_tokens]

    def keep(self, stream: Tensor) -> None:
        """Keep what the stage leaves to another."""
        if not self._pipeline.is_last:
            self.leaving[: len(stream)] = stream

    def receive(self, places: Array) -> None:
        """Wait for the step's tokens; they go to these places, [T]."""
        if not self._pipeline.is_first:
            shape = len(places), self._entering.shape[1]
            came = self._pipeline.receive(shape, self._entering.dtype, self._entering.device)
            self._entering[to_device(places, came.device)] = came

    def send(self, places: Array) -> None:
        """Send the step's tokens, which stand at these places."""
        if not self._pipeline.is_last:
            self._pipeline.send(self.leaving[to_device(places, self.leaving.device)])
