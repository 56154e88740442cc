"""`Peers` are GPUs that read each other's memory: what ranks say to each other in small pieces goes that way.

Which way is taken depends on the size of a message alone, by limits on which all ranks agree.
"""

from typing import NamedTuple

from torch import Tensor

from octavo.runtime.kernels.peers import PeerKernels, PeerMemory
from octavo.runtime.kernels.sampling import Choice


class Limits(NamedTuple):
    """Holds the largest messages, in bytes, for which a way is the fastest; NCCL takes the others."""

    one_shot: int
    two_shots: int


class Peers:
    """Adds up and gathers by kernels over memory that all ranks of a group have opened."""

    def __init__(self, memory: PeerMemory, kernels: PeerKernels, limits: Limits) -> None:
        self.memory, self.limits = memory, limits
        self._kernels = kernels

    def takes(self, x: Tensor, *, by_rows: bool = False) -> bool:
        """Return True if x is to be added up here. by_rows: and normalised"""
        is_small = _num_bytes(x) <= self.limits.two_shots and self.memory.holds(x, by_rows=by_rows)
        return is_small and x.is_contiguous()

    def takes_gather(self, x: Tensor) -> bool:
        """Return True if x is to be gathered here: what every rank has is read by all."""
        return _num_bytes(x) * self.memory.size <= self.limits.two_shots and self.memory.holds(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See peers.Sum."""
        return self._kernels.sum(self.memory, x, two_shots=self._two_shots(x))

    def add_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See peers.SumAddNorm."""
        return self._kernels.sum_add_norm(self.memory, x, weight, eps, residual, two_shots=self._two_shots(x))

    def gather(self, x: Tensor) -> Tensor:
        """See peers.Gather."""
        return self._kernels.gather(self.memory, x)

    def choose(self, choice: Choice, start: int) -> Choice:
        """See peers.ChooseAmong."""
        return self._kernels.choose(self.memory, choice, start)

    def _two_shots(self, x: Tensor) -> bool:
        return _num_bytes(x) > self.limits.one_shot


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
