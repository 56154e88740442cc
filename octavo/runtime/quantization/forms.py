"""A `Form` says how a matrix is stored as several tensors; a `StoredParameter` keeps these for a while."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.runtime.quantization.grouped import Grouped, Kind
from octavo.runtime.quantization.packed_layout import PackedLayout
from octavo.runtime.quantization.parameter import Layout, Parameter, Shard, Stored

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Part(NamedTuple):
    """What a rank keeps of a matrix [outputs, inputs]: its slices, and how many there are in all."""

    outputs: Shard
    inputs: Shard


class Expected(NamedTuple):
    """A tensor that a form keeps: its types and its layout, None = kept whole, of any shape.

    is_optional: perhaps it is not there; is_flat: stored as one long row
    """

    layout: PackedLayout | None
    dtypes: tuple[torch.dtype, ...]
    is_optional: bool = False
    is_flat: bool = False


class Form(ABC):
    """Says which tensors make up a matrix, by the last part of their names, and reads them."""

    rounds_inputs: bool = False
    """The recipe rounds inputs to 8 bits, too (W8A8)."""

    @abstractmethod
    def tensors(self, part: Part) -> Mapping[str, Expected]:
        """Return the tensors of a matrix. Raises BadCheckpoint where its shape does not fit the form."""

    @property
    @abstractmethod
    def packed_as(self) -> tuple[Kind, int]:
        """Return the kind of blocks that matrices mostly become, and their `group`; see `outline`."""

    @abstractmethod
    def read(self, stored: Mapping[str, Tensor], part: Part) -> Grouped:
        """Return this rank's part; each tensor has the entries that serve it. Raises BadCheckpoint."""


class StoredParameter(Parameter):
    """Keeps the parts of tensors of one name as they are stored, until they are packed."""

    is_movable = False

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.missing = []
        self.parts: dict[str, Tensor] = {}
        self._layouts: dict[str, Layout] = {}

    def expect(self, matrix: Layout, expected: Expected) -> None:
        """Take a tensor for the one shard of `matrix`. Raises ConfigError."""
        (shard,) = matrix.shards
        self._expected = expected
        self._layouts[shard.name] = matrix if expected.layout is None else expected.layout.of(matrix)
        self.dtypes, self.is_required = expected.dtypes, not expected.is_optional
        self.missing.append(shard.name)

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (shard, a tensor without bytes) for all that must be there."""
        for name in list(self.missing) if self.is_required else []:
            layout = self._layouts[name]
            shape = layout.full_shape(layout.shards)
            yield name, torch.empty(shape, dtype=self.dtypes[0], device="meta")

    def load(self, tensor: Stored, name: str = "") -> None:
        """See Parameter.load; axes of one entry may be left out, and a single number serves all shards."""
        if not isinstance(tensor, Tensor):
            raise BadCheckpoint("GGUF blocks where a tensor of a packed matrix is expected")
        if self._expected.layout is None:
            self._keep_whole(tensor, name)
            return
        chosen = [self._layouts[shard] for shard in self._named(name)]
        layout = replace(chosen[0], shards=tuple(shard for other in chosen for shard in other.shards))
        expected = layout.full_shape(layout.shards)
        if tensor.numel() == 1 and prod(expected) == len(chosen):
            tensor = tensor.reshape([1] * len(expected)).expand(expected)
        long = [size for size in expected if size != 1]
        found = [size for size in tensor.shape if size != 1]
        if found == long or (self._expected.is_flat and found == [prod(long)]):
            tensor = tensor.reshape(expected)
        self.layout = layout
        super().load(tensor, "")

    def _keep_whole(self, tensor: Tensor, name: str) -> None:
        for shard in self._named(name):
            self.parts[shard] = tensor
            self.missing.remove(shard)

    def _named(self, name: str) -> list[str]:
        """Return the shards that a tensor of this name holds; all for one that no shard has."""
        named = [shard for shard in self._layouts if shard == name or shard.endswith(f".{name}")]
        return named or list(self._layouts)

    def _keep(self, shard: Shard, part: Stored) -> int:
        assert isinstance(part, Tensor)
        self.parts[shard.name] = part
        return part.nbytes


def part_of(layout: Layout) -> Part:
    """Return the part of the matrix that a layout of one shard keeps."""
    (shard,), (other,) = layout.shards, layout.others
    whole = Shard(shard.name, other, 0, other)
    return Part(shard, whole) if layout.split_axis == 0 else Part(whole, shard)


@contextmanager
def blaming(name: str, shard: Shard) -> Iterator[None]:
    """Let faults name the layer."""
    try:
        yield
    except BadCheckpoint as error:
        raise BadCheckpoint(f"layer {name}{shard.name and ':'}{shard.name}: {error}") from error
