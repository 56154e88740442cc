"""A `ParallelContext` says which part of the model this process keeps; its groups join the parts.

Made once by the worker, given to constructors through `BuildContext`; nothing asks a global for its rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain

import torch
from torch import Tensor, distributed

from octavo.runtime.distributed.exchange import TokenExchange
from octavo.runtime.distributed.group import ONE, Group

_LAUNCHED = "env://"
_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Holds this rank's place on each axis.

    tp:    ranks that share each layer
    dcp:   those of tp that divide the tokens of the KV cache, neighbours
    pp:    stages, which have some of the layers each
    ep:    ranks that have some of the experts each: those of tp, or of all replicas, or one
    world: all ranks of one replica, stage by stage
    tokens: as pp; tokens go from the last stage to the first past the hidden states that go the other way
    steps: where replicas share experts, all their ranks, which agree on their steps over the host
    """

    tp: Group = ONE
    pp: Group = ONE
    ep: Group = ONE
    world: Group = ONE
    tokens: Group = ONE
    steps: Group = ONE
    exchange: TokenExchange | None = None
    """Of the replicas that share experts."""
    redundant_experts: int | None = None
    """Copies of experts in each layer, on all ranks of ep together; None = experts are not moved."""
    dcp: Group = ONE
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
        replica: tuple[int, int] = (0, 1),
    ) -> "ParallelContext":
        """Meet the other ranks at `init_method`: gloo on CPU, NCCL on CUDA.

        rank: in the replica; ranks of one stage stand side by side
        init_method: tcp://host:port, file://path; env:// as torchrun's variables say, also for a single rank
        replica: which this is, and of how many that share their experts
        """
        number, count = replica
        per_replica = tp_size * pp_size
        size = count * per_replica
        if size == 1 and not init_method:
            return cls()
        is_there = init_method == _LAUNCHED and distributed.is_initialized()  # by the program itself
        rank += number * per_replica
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
        everyone = Group(rank, size, distributed.group.WORLD if size > 1 else None)
        stages = [list(range(first, first + tp_size)) for first in range(0, size, tp_size)]
        replicas = [stages[first : first + pp_size] for first in range(0, len(stages), pp_size)]
        columns = [list(column) for part in replicas for column in zip(*part, strict=True)]
        world = _join(everyone, [list(chain(*part)) for part in replicas])
        tp, pp = _join(everyone, stages), _join(everyone, columns)
        tokens = _join(everyone, columns, shares=False) if pp_size > 1 else ONE
        if count == 1:
            return cls(tp, pp, tp if has_ep else ONE, world, tokens, is_own=not is_there)
        steps = Group(rank, size, distributed.new_group(backend="gloo"))
        exchange = TokenExchange(everyone, tp)
        return cls(tp, pp, everyone, world, tokens, steps, exchange, is_own=not is_there)

    def neighbours(self, count: int) -> Group:
        """Return this rank's group among those of `count` ranks of tp; all processes make all of them."""
        if count in (1, self.tp_size):
            return self.tp if count > 1 else ONE
        everyone = Group(distributed.get_rank(), distributed.get_world_size())
        return _join(everyone, [[*range(i, i + count)] for i in range(0, everyone.size, count)], shares=False)

    @property
    def answers(self) -> bool:
        """Return True on the rank that tells what steps brought: what others find, it learns from NaN."""
        return self.pp.is_last and self.tp.is_first

    @property
    def is_alone(self) -> bool:
        """Return True if no other rank takes part in this one's steps."""
        return self.world.size == self.ep.size == 1

    @property
    def is_recordable(self) -> bool:
        """Return True if ranks meet by kernels alone while they compute their layers."""
        meets_by_kernels = self.tp.size == 1 or self.tp.peers is not None
        return meets_by_kernels and self.exchange is None and self.dcp.size == 1

    def as_one_stage(self) -> "ParallelContext":
        """Return the same for a model that the ranks of this stage have whole."""
        return self if self.pp.size == 1 else replace(self, pp=ONE, tokens=ONE, world=self.tp, layers=None)

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
