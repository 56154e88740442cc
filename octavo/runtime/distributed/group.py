"""A `Group` is one parallel axis as a rank sees it: its place on it, and how it speaks to the others.

In a group of one rank every collective returns its argument.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, distributed

from octavo.runtime.distributed.peers import Peers
from octavo.runtime.kernels.sampling import Choice

_MOST_UNDER_WAY = 4
_gather: Callable[..., object] = getattr(  # its name from torch 2.13 on
    distributed, "all_gather_single", distributed.all_gather_into_tensor
)


@dataclass(frozen=True, slots=True)
class Group:
    """Holds rank and size of one parallel axis; `process_group` is None for a single rank."""

    rank: int = 0
    size: int = 1
    process_group: distributed.ProcessGroup | None = None
    peers: Peers | None = None
    """Where the ranks see each other's memory."""
    under_way: deque[tuple[distributed.Work | None, Tensor]] = field(default_factory=deque, compare=False)
    """Tensors that may not have been sent yet."""

    @property
    def is_first(self) -> bool:
        """Return True for rank 0."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Return True for the highest rank."""
        return self.rank == self.size - 1

    def least(self, number: int, device: torch.device) -> int:
        """Return the smallest of the ranks' numbers."""
        if self.process_group is None:
            return number
        numbers = torch.tensor([number], dtype=torch.int64, device=device)
        distributed.all_reduce(numbers, distributed.ReduceOp.MIN, group=self.process_group)
        return int(numbers)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks; x may be changed."""
        if self.peers is not None and self.peers.takes(x):
            return self.peers.all_reduce(x)
        return self.all_reduce_by_nccl(x)

    def all_reduce_by_nccl(self, x: Tensor) -> Tensor:
        """Sum over the ranks by NCCL, or gloo; x is changed in place and returned."""
        if self.process_group is not None:
            distributed.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Join [rows, n] of every rank, all of one shape, to [rows, size * n]."""
        if self.process_group is None:
            return x
        x = x.contiguous()
        if self.peers is not None and self.peers.takes_gather(x):
            parts = self.peers.gather(x)
        else:
            parts = self.gather_rows(x).view(self.size, *x.shape)
        return parts.movedim(0, 1).flatten(1)

    def gather_rows(self, x: Tensor) -> Tensor:
        """Join [rows, n] of every rank, all of one shape, to [size * rows, n]."""
        if self.process_group is None:
            return x
        rows = x.new_empty((self.size * len(x), *x.shape[1:]))
        _gather(rows, x.contiguous(), group=self.process_group)
        return rows

    def all_to_all(self, x: Tensor, came: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
        """Send every rank its rows of x, and return the rows for this one, rank by rank.

        came, sent: their numbers by rank; None = equal ones
        """
        if self.process_group is None:
            return x
        x = x.contiguous()
        rows = torch.empty_like(x) if came is None else x.new_empty((sum(came), *x.shape[1:]))
        distributed.all_to_all_single(rows, x, came, sent, group=self.process_group)
        return rows

    def choose(self, choice: Choice, start: int) -> Choice:
        """Return the greedy choice from logits of which each rank has a part, beginning at the id `start`."""
        if self.process_group is None:
            return choice
        if self.peers is not None:
            return self.peers.choose(choice, start)
        ids = self.all_gather(choice.token_ids[:, None] + start)
        maxima = self.all_gather(choice.max_logits[:, None])
        best = maxima.max(dim=1).values  # of equal ones the first rank has the lowest id
        first = (maxima == best[:, None]).int().argmax(dim=1, keepdim=True)
        return Choice(ids.gather(1, first)[:, 0], best)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Wait for a tensor of the rank before this one."""
        x = torch.empty(shape, dtype=dtype, device=device)
        if self.process_group is not None:
            distributed.recv(x, group=self.process_group, group_src=self.rank - 1)
        return x

    def send(self, x: Tensor, rank: int | None = None) -> None:
        """Send a tensor to a rank, the one behind this by default; the device does not wait for it."""
        if self.process_group is None:
            return
        x = x.contiguous()
        to = self.rank + 1 if rank is None else rank
        self.under_way.append((distributed.isend(x, group=self.process_group, group_dst=to), x))
        if len(self.under_way) > _MOST_UNDER_WAY:
            _wait(self.under_way.popleft()[0])

    def start_receiving(self, x: Tensor, rank: int) -> Callable[[], None]:
        """Have a rank's tensor written to x; the returned function lets the device wait for it."""
        return partial(_wait, distributed.irecv(x, group=self.process_group, group_src=rank))


ONE = Group()


def _wait(work: distributed.Work | None) -> None:
    if work is not None:
        work.wait()
