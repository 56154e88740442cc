"""`ParallelContext`: which part of every layer this process keeps, and the collectives that join the parts.

Made once by the worker, given to constructors through `BuildContext`; nothing asks a global for its rank.
With one rank every collective returns its argument.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Rank and size of the tensor parallel group; `group` is None for a single rank."""

    tp_rank: int = 0
    tp_size: int = 1
    group: distributed.ProcessGroup | None = None

    @classmethod
    def create(
        cls, rank: int, size: int, init_method: str, device: torch.device, timeout_s: float = 600
    ) -> "ParallelContext":
        """Meet the other ranks at `init_method` (tcp://host:port, file://path): gloo on CPU, NCCL on CUDA."""
        if size == 1:
            return cls()
        distributed.init_process_group(
            _BACKENDS[device.type],
            init_method=init_method,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        return cls(rank, size, distributed.group.WORLD)

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
        """Leave the group."""
        if self.group is not None:
            distributed.destroy_process_group()
