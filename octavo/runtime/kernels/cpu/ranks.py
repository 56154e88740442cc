"""The peer family on a CPU: ranks of one host map the same memory. Messages of any length go in pieces."""

import torch
from torch import Tensor

from octavo.runtime.kernels.cpu.library import Library
from octavo.runtime.kernels.norms import AddNorm
from octavo.runtime.kernels.peers import PeerKernels, PeerMemory
from octavo.runtime.kernels.sampling import Choice


class CompiledRanks:
    """The ops over one loaded library; each is what its family says of it."""

    def __init__(self, library: Library, add_norm: AddNorm) -> None:
        self._library, self._add_norm = library, add_norm
        self.kernels = PeerKernels(self.sum, self.sum_add_norm, self.gather, self.choose)

    def sum(self, memory: PeerMemory, x: Tensor, *, two_shots: bool) -> Tensor:
        """See peers.Sum; x is changed. A rank adds up all of each piece, which is in its caches."""
        assert x.dtype == torch.float32
        self._library.octavo_sum_ranks(*_group(memory), x.data_ptr(), x.numel())
        return x

    def sum_add_norm(
        self, memory: PeerMemory, x: Tensor, weight: Tensor, eps: float, residual: Tensor, *, two_shots: bool
    ) -> tuple[Tensor, Tensor]:
        """See peers.SumAddNorm; x is changed."""
        return self._add_norm(self.sum(memory, x, two_shots=two_shots), weight, eps, residual)

    def gather(self, memory: PeerMemory, x: Tensor) -> Tensor:
        """See peers.Gather."""
        x = x.contiguous()
        out = x.new_empty((memory.size, *x.shape))
        num_bytes = x.numel() * x.element_size()
        self._library.octavo_gather_ranks(*_group(memory), x.data_ptr(), num_bytes, out.data_ptr())
        return out

    def choose(self, memory: PeerMemory, choice: Choice, start: int) -> Choice:
        """See peers.ChooseAmong; the choice is changed."""
        ids, logits = choice
        choose = self._library.octavo_choose_ranks
        choose(*_group(memory), ids.data_ptr(), logits.data_ptr(), len(ids), start)
        return choice

    def own_rows(self, ids: Tensor, start: int, size: int) -> Tensor:
        """See linear.OwnRows."""
        rows = torch.empty_like(ids)
        self._library.octavo_own_rows(ids.data_ptr(), len(ids), start, size, rows.data_ptr())
        return rows


def _group(memory: PeerMemory) -> tuple[int, ...]:
    places = memory.regions, memory.flags, memory.turns
    return *(place.data_ptr() for place in places), memory.rank, memory.size
