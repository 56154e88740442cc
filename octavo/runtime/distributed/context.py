"""A `ParallelContext` says which part of every layer this process keeps; its collectives join the parts.

Made once by the worker, given to constructors through `BuildContext`; nothing asks a global for its rank.
With one rank every collective returns its argument.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed

_LAUNCHED = "env://"
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Holds rank and size of the tensor parallel group; `group` is None for a single rank."""

    tp_rank: int = 0
    tp_size: int = 1
    group: distributed.ProcessGroup | None = None
    is_own: bool = False
    """torch's process group was made here, and ends with this."""

    @classmethod
    def create(
        cls, rank: int, size: int, init_method: str, device: torch.device, timeout_s: float = 600
    ) -> "ParallelContext":
        """Meet the other ranks at `init_method`: gloo on CPU, NCCL on CUDA.

        init_method: tcp://host:port, file://path; env:// as torchrun's variables say, also for a single rank
        """
        if size == 1 and not init_method:
            return cls()
        is_there = init_method == _LAUNCHED and distributed.is_initialized()  # by the program itself
        if not is_there:
            alone = size == 1
            distributed.init_process_group(
                _BACKENDS[device.type],
                init_method=None if alone else init_method,
                store=distributed.HashStore() if alone else None,  # type: ignore[attr-defined]  # it is public
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
        return cls(rank, size, distributed.group.WORLD if size > 1 else None, is_own=not is_there)

    def least(self, number: int, device: torch.device) -> int:
        """Return the smallest of the ranks' numbers."""
        if self.group is None:
            return number
        numbers = torch.tensor([number], dtype=torch.int64, device=device)
        distributed.all_reduce(numbers, distributed.ReduceOp.MIN, group=self.group)
        return int(numbers)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks; x is changed in place and returned."""
        if self.group is not None:
            distributed.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Join [rows, size] of every rank, all of one shape, to [rows, tp_size * size]."""
        if self.group is None:
            return x
        parts = [torch.empty_like(x) for _ in range(self.tp_size)]
        distributed.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def close(self) -> None:
        """Leave the group, also one of a single rank: its threads must not outlive what they use."""
        if self.is_own:
            distributed.destroy_process_group()
