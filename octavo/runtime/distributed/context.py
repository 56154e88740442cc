"""A `ParallelContext` says which part of the model this process keeps; its groups join the parts.

Made once by the worker, given to constructors through `BuildContext`; nothing asks a global for its rank.
In a group of one rank every collective returns its argument.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor, distributed

from octavo.runtime.distributed.peers import Peers
from octavo.runtime.kernels.sampling import Choice

_LAUNCHED = "env://"
_MOST_UNDER_WAY = 4
_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
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
            parts = x.new_empty((self.size, *x.shape))
            _gather(parts.flatten(0, 1), x, group=self.process_group)
        return parts.movedim(0, 1).flatten(1)

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


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Holds this rank's place on each axis. (Replicas, data parallel, share nothing and are no axis here.)

    tp:    ranks that share each layer
    pp:    stages, which have some of the layers each
    ep:    ranks that have some of the experts each; those of tp, or one
    world: all ranks of one replica, stage by stage
    tokens: as pp; tokens go from the last stage to the first past the hidden states that go the other way
    """

    tp: Group = ONE
    pp: Group = ONE
    ep: Group = ONE
    world: Group = ONE
    tokens: Group = ONE
    redundant_experts: int | None = None
    """Copies of experts in each layer, on all ranks of ep together; None = experts are not moved."""
    layers: range | None = None
    """Of this stage; None = all."""
    is_own: bool = False
    """torch's process group was made here, and ends with this."""

    @classmethod
    def create(
        cls,
        rank: int,
        tp_size: int,
        init_method: str,
        device: torch.device,
        *,
        pp_size: int = 1,
        has_ep: bool = False,
        timeout_s: float = 600,
    ) -> "ParallelContext":
        """Meet the other ranks of this replica at `init_method`: gloo on CPU, NCCL on CUDA.

        rank: in the replica; ranks of one stage stand side by side
        init_method: tcp://host:port, file://path; env:// as torchrun's variables say, also for a single rank
        """
        size = tp_size * pp_size
        if size == 1 and not init_method:
            return cls()
        is_there = init_method == _LAUNCHED and distributed.is_initialized()  # by the program itself
        if not is_there:
            alone = size == 1
            distributed.init_process_group(
                _BACKENDS.get(device.type, "gloo"),
                init_method=None if alone else init_method,
                store=distributed.HashStore() if alone else None,  # type: ignore[attr-defined]  # it is public
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
        world = Group(rank, size, distributed.group.WORLD if size > 1 else None)
        stages = [list(range(first, first + tp_size)) for first in range(0, size, tp_size)]
        columns = [list(column) for column in zip(*stages, strict=True)]
        tp, pp = _join(world, stages), _join(world, columns)
        tokens = _join(world, columns, shares=False) if pp_size > 1 else ONE
        return cls(tp, pp, tp if has_ep else ONE, world, tokens, is_own=not is_there)

    @property
    def first_layer(self) -> int:
        """Return the number of this stage's first layer."""
        return self.layers.start if self.layers else 0

    @property
    def tp_rank(self) -> int:
        """Return the rank among those that share each layer."""
        return self.tp.rank

    @property
    def tp_size(self) -> int:
        """Return how many ranks share each layer."""
        return self.tp.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks that share each layer; x may be changed."""
        return self.tp.all_reduce(x)

    def defer_sum(self, x: Tensor) -> Tensor | Callable[[Tensor, float, Tensor], tuple[Tensor, Tensor]]:
        """Return `all_reduce`, or one kernel for it and for the RMS norm that adds it to the stream."""
        peers = self.tp.peers
        if peers is not None and peers.takes(x, by_rows=True):
            return partial(peers.add_norm, x)
        return self.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Join [rows, n] of the ranks that share each layer, all of one shape, to [rows, tp_size * n]."""
        return self.tp.all_gather(x)

    def close(self) -> None:
        """Leave the group, also one of a single rank: its threads must not outlive what they use."""
        if self.is_own:
            distributed.destroy_process_group()


ALONE = ParallelContext()


def _wait(work: distributed.Work | None) -> None:
    if work is not None:
        work.wait()


def _join(world: Group, lists: list[list[int]], *, shares: bool = True) -> Group:
    """Return the one of these groups of ranks that this rank is in; every rank makes all of them.

    shares: the world's communicator, if that is all of it
    """
    if len(lists) == 1 and shares:
        return world
    mine = ONE
    for ranks in lists:
        made = distributed.new_group(ranks) if len(ranks) > 1 else None
        if world.rank in ranks:
            mine = Group(ranks.index(world.rank), len(ranks), made)
    return mine
