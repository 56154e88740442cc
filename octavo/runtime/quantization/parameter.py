"""Parameters take their own shard: the layer gives the layout of a weight, the loader whole tensors.

A `Layout` names the tensors of the checkpoint that make up one weight (q, k and v; gate and up) and the part
of each that this rank keeps. `Parameter.load` checks shapes and keeps that part; what was not loaded stays in
`missing`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.runtime.quantization.blocks import Blocks

Stored = Tensor | Blocks
"""A tensor of a checkpoint, plain or packed."""


class Shard(NamedTuple):
    """A rank keeps [start, start + size) of a tensor's `full` entries along the split axis."""

    name: str
    full: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Says how tensors of a checkpoint make up one weight, and what this rank keeps of them.

    shards:     the tensors, in their order along `stack_axis`
    others:     lengths of one tensor's axes, without the split axis
    split_axis: cut over the ranks
    owners:     (rank, ranks) where ranks have some of the stack's entries each
    stack_axis: where the tensors stand behind each other: rows of a merged projection, or experts, as which
                tensors without this axis count, too
    """

    shards: tuple[Shard, ...]
    others: tuple[int, ...] = ()
    split_axis: int = 0
    stack_axis: int = 0
    owners: tuple[int, int] = (0, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's part."""
        return self._join([self._shape(shard.size) for shard in self.shards])

    def full_shape(self, shards: tuple[Shard, ...]) -> tuple[int, ...]:
        """Return the shape of a tensor of the checkpoint that holds all of these shards."""
        return self._join([self._shape(shard.full) for shard in shards])

    def select(self, name: str) -> tuple[Shard, ...]:
        """Return the shard `name`, or those of all experts ("gate": "0.gate", "1.gate", …).

        All of them for the empty name (a checkpoint that stores them fused).
        """
        return tuple(s for s in self.shards if not name or s.name == name or s.name.endswith(f".{name}"))

    def is_elsewhere(self, name: str) -> bool:
        """Return True if the shard `name` is an entry that another rank has."""
        return self.owners[1] > 1 and not self.select(name)

    def own_entries(self, tensor: Stored, shards: tuple[Shard, ...]) -> Stored:
        """Return this rank's entries, which are `shards`, of a tensor that may hold those of all ranks."""
        (rank, count), axis = self.owners, self.stack_axis
        length = self.full_shape(shards)[axis]
        is_all = count > 1 and tensor.shape[axis] == count * length
        return tensor.narrow(axis, rank * length, length) if is_all else tensor

    def is_entry(self, shape: tuple[int, ...], shards: tuple[Shard, ...]) -> bool:
        """Return True if `shape` is that of one entry of a stack, without the stack axis."""
        full, axis = self.full_shape(shards), self.stack_axis
        is_single = axis != self.split_axis and full[axis] == 1
        return is_single and tuple(shape) == (*full[:axis], *full[axis + 1 :])

    def cut(self, tensor: Stored, shards: tuple[Shard, ...]) -> Iterator[tuple[Shard, Stored]]:
        """Yield this rank's part of each of `shards`, which `tensor` holds. Raises ConfigError."""
        offset = 0
        for shard in shards:
            length = self._shape(shard.full)[self.stack_axis]
            whole = tensor.narrow(self.stack_axis, offset, length)
            yield shard, whole.narrow(self.split_axis, shard.start, shard.size)
            offset += length

    def divide(self, data: Tensor) -> dict[str, Tensor]:
        """Return the place of each shard in what this rank keeps, by name."""
        lengths = [self._shape(shard.size)[self.stack_axis] for shard in self.shards]
        parts = torch.split(data, lengths, dim=self.stack_axis)
        return {shard.name: part for shard, part in zip(self.shards, parts, strict=True)}

    def _shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of one tensor that is so long along the split axis."""
        return (*self.others[: self.split_axis], length, *self.others[self.split_axis :])

    def _join(self, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        axis, first = self.stack_axis, shapes[0]
        return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])


def vector(size: int) -> Layout:
    """Return the layout of a vector that every rank keeps whole."""
    return Layout((Shard("", size, 0, size),))


class Parameter(ABC):
    """Takes one weight of a layer on this rank."""

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    """The stored types that it takes."""
    is_required: bool = True
    is_movable: bool = True
    """A family may rearrange what is stored."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.missing = [shard.name for shard in layout.shards]
        self.num_bytes = 0
        """Bytes that this rank keeps, as far as loaded."""

    def load(self, tensor: Stored, name: str = "") -> None:
        """Keep this rank's part of a whole tensor. Raises BadCheckpoint for a wrong shape or a repeat."""
        shards = self.layout.select(name)
        if not shards:
            raise BadCheckpoint(f"this model has no {name!r} beside {[s.name for s in self.layout.shards]}")
        expected = self.layout.full_shape(shards)
        if isinstance(tensor, Tensor) and self.layout.is_entry(tensor.shape, shards):
            tensor = tensor.unsqueeze(self.layout.stack_axis)
        tensor = self.layout.own_entries(tensor, shards)
        if tuple(tensor.shape) != expected:
            raise BadCheckpoint(f"expected shape {list(expected)}, found {list(tensor.shape)}")
        for shard, part in self.layout.cut(tensor, shards):
            if shard.name not in self.missing:
                raise BadCheckpoint(
                    "the same weight was loaded before, under another name or from another file"
                )
            self.missing.remove(shard.name)
            self.num_bytes += self._keep(shard, part)

    @abstractmethod
    def _keep(self, shard: Shard, part: Stored) -> int:
        """Store the part of `shard` that belongs to this rank; returns its bytes."""


class DenseParameter(Parameter):
    """Writes a plain tensor `data` of the layout's shape."""

    def __init__(self, layout: Layout, data: Tensor) -> None:
        super().__init__(layout)
        self.data = data
        self._parts = layout.divide(data)

    def live_in(self, data: Tensor) -> None:
        """Take `data` for the tensor from here on, of the same shape and type; nothing more can be loaded."""
        self.data, self._parts = data, {}

    def leave_out(self, name: str) -> None:
        """Take zeros for a shard that checkpoints do not have."""
        self._parts[name].zero_()
        self.missing.remove(name)

    def _keep(self, shard: Shard, part: Stored) -> int:
        if isinstance(part, Blocks):
            raise BadCheckpoint(f"{part.type.name} blocks where a plain tensor is expected")
        return self._parts[shard.name].copy_(part).nbytes


class BlockParameter(Parameter):
    """Keeps packed matrices, one segment per tensor of the checkpoint, because their types may differ."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout)
        self._device = device
        self._segments: dict[str, Blocks] = {}

    def take(self) -> list[Blocks]:
        """Hand over the segments, in the layout's order; the parameter keeps none."""
        return [self._segments.pop(shard.name) for shard in self.layout.shards]

    def _keep(self, shard: Shard, part: Stored) -> int:
        if isinstance(part, Tensor):
            raise BadCheckpoint("a plain tensor where GGUF blocks are expected")
        self._segments[shard.name] = part.to(self._device)
        return part.data.nbytes


MakeBlocks = Callable[[Layout, torch.device], BlockParameter]
