"""`PackedLinear` multiplies matrices that a checkpoint stores as several tensors, in a `Form` per shard.

A scheme says by the name of a module in the checkpoint how its matrix is stored: as a `Form`, or plain
(None). Shards of one projection may differ (q in 8 bits, k in 4, v plain): each keeps its own scales, and
becomes blocks when everything is loaded.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import accumulate
from math import prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.config.engine import EngineConfig
from octavo.runtime.kernels.activations import Activation
from octavo.runtime.quantization.blocks import Blocks, blocks_of_one
from octavo.runtime.quantization.gguf import GGUFLinear
from octavo.runtime.quantization.grouped import Grouped, pack
from octavo.runtime.quantization.method import LinearMethod, Scheme, Sources, Storage
from octavo.runtime.quantization.packed_layout import PackedLayout
from octavo.runtime.quantization.parameter import Layout, Parameter, Shard, Stored
from octavo.runtime.quantization.stored_config import stored_quantization
from octavo.runtime.quantization.unquantized import Unquantized

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

    @abstractmethod
    def tensors(self, part: Part) -> Mapping[str, Expected]:
        """Return the tensors of a matrix. Raises BadCheckpoint where its shape does not fit the form."""

    @abstractmethod
    def read(self, stored: Mapping[str, Tensor], part: Part) -> Grouped:
        """Return this rank's part; each tensor has the entries that serve it. Raises BadCheckpoint."""


class StoredParameter(Parameter):
    """Keeps the parts of tensors of one name as they are stored, until they are packed."""

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

    def load(self, tensor: Stored, name: str = "") -> None:
        """See Parameter.load; axes of one entry may be left out, and a single number serves all shards."""
        if not isinstance(tensor, Tensor):
            raise BadCheckpoint("GGUF blocks where a tensor of a packed matrix is expected")
        if self._expected.layout is None:
            self._keep_whole(tensor, name)
            return
        chosen = [self._layouts[name]] if name in self._layouts else list(self._layouts.values())
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
        for shard in [name] if name in self._layouts else list(self._layouts):
            self.parts[shard] = tensor
            self.missing.remove(shard)

    def _keep(self, shard: Shard, part: Stored) -> int:
        assert isinstance(part, Tensor)
        self.parts[shard.name] = part
        return part.nbytes


FormOf = Callable[[str], Form | None]
"""Takes a shard's name; returns how it is stored, None = plain."""


class PackedLinear(GGUFLinear):
    """Multiplies segments of blocks, each with columns in an order of its own if need be."""

    def __init__(self, storage: Storage, name: str, form_of: FormOf) -> None:
        super().__init__(storage)
        self._name, self._form_of = name, form_of
        self._stored: dict[str, StoredParameter] = {}
        self._places: list[Tensor | None] = []
        self._order: Tensor | None = None
        """Of the columns of `_whole`."""

    def create(self, layout: Layout) -> dict[str, Parameter]:
        self._layout = layout
        for shard in layout.shards:
            single = replace(layout, shards=(shard,))
            form, part = self._form_of(shard.name), _part_of(single)
            with _blaming(self._name, shard):
                tensors = PLAIN if form is None else form.tensors(part)
            for suffix, expected in tensors.items():
                self._stored.setdefault(suffix, StoredParameter(single)).expect(single, expected)
        return dict(self._stored)

    def after_load(self) -> None:
        """Pack shard by shard; what was stored is let go."""
        segments: list[Blocks] = []
        for shard in self._layout.shards:
            with _blaming(self._name, shard):
                blocks, places = self._pack(shard)
            segments.append(blocks.to(self._storage.device))
            self._places.append(None if places is None else places.to(self._storage.device))
        for parameter in self._stored.values():
            parameter.parts, parameter.num_bytes = {}, 0
        next(iter(self._stored.values())).num_bytes = sum(segment.data.nbytes for segment in segments)
        self._settle(segments)

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply, segment by segment if their columns differ in order."""
        if not self._is_ordered:
            return super().apply(x, bias)
        if self._order is not None:
            return super().apply(self._select(x, self._order), bias)
        ends = list(accumulate(len(segment.blocks) for segment in self._segments))
        out = x.new_empty(x.shape[0], ends[-1])
        for segment, places, end in zip(self._segments, self._places, ends, strict=True):
            columns = slice(end - len(segment.blocks), end)
            inputs = x if places is None else self._select(x, places)
            part = None if bias is None else bias[columns]
            self._storage.kernels.block_matmul(inputs, segment, part, out[:, columns])
        return out

    def apply_gated(self, x: Tensor, bias: Tensor | None, gate: Activation) -> Tensor | None:
        return super().apply_gated(x if self._order is None else self._select(x, self._order), bias, gate)

    def apply_greedy(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        return super().apply_greedy(x if self._order is None else self._select(x, self._order))

    def gather(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Unpack the rows asked for, columns as they were."""
        rows = super().gather(ids, scale)
        if self._order is None:
            return rows
        there = self._order >= 0
        out = rows.new_empty(len(rows), int(there.sum()))
        out[:, self._order[there].long()] = rows[:, there]
        return out

    def _select(self, x: Tensor, places: Tensor) -> Tensor:
        return self._storage.kernels.select_inputs(x, places)

    def _pack(self, shard: Shard) -> tuple[Blocks, Tensor | None]:
        stored = {
            suffix: parameter.parts[shard.name]
            for suffix, parameter in self._stored.items()
            if shard.name in parameter.parts
        }
        form = self._form_of(shard.name)
        if form is None:
            return blocks_of_one(stored["weight"].to(self._storage.weight_dtype).contiguous()), None
        return pack(form.read(stored, _part_of(replace(self._layout, shards=(shard,)))))

    def _settle(self, segments: list[Blocks]) -> None:
        """Join segments of one type whose columns are in one order; take them over."""
        first, places = segments[0], self._places
        same = all(other.type == first.type and other.shape[1] == first.shape[1] for other in segments)
        if same and all(_equal(places[0], other) for other in places):
            data = self._storage.arena.empty(
                (sum(len(part.data) for part in segments), first.data.shape[1]),
                torch.uint8,
                first.data.device,
            )
            segments = [Blocks(torch.cat([part.data for part in segments], out=data), first.type)]
            self._order, self._places = places[0], places[:1]
        self._is_ordered = any(places is not None for places in self._places)
        self._keep(segments)


PLAIN = {"weight": Expected(PackedLayout(), FLOATS)}


def _part_of(layout: Layout) -> Part:
    """Return the part of the matrix that a layout of one shard keeps."""
    (shard,), (other,) = layout.shards, layout.others
    whole = Shard(shard.name, other, 0, other)
    return Part(shard, whole) if layout.split_axis == 0 else Part(whole, shard)


@contextmanager
def _blaming(name: str, shard: Shard) -> Iterator[None]:
    """Let faults name the layer."""
    try:
        yield
    except BadCheckpoint as error:
        raise BadCheckpoint(f"layer {name}{shard.name and ':'}{shard.name}: {error}") from error


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


class PackedScheme(Scheme):
    """Serves checkpoints whose config says of every module how it is stored."""

    METHODS: ClassVar[tuple[str, ...]]
    """The values of `quant_method` that the scheme reads."""

    def __init__(self, storage: Storage, config: EngineConfig, sources: Sources) -> None:
        super().__init__(storage, config, sources)
        self.stored = stored_quantization(config)
        self.forms = cache(self.form_of)
        self._plain = Unquantized(storage, config, sources)

    @classmethod
    def matches(cls, config: EngineConfig) -> bool:
        return stored_quantization(config).get("quant_method") in cls.METHODS

    @abstractmethod
    def form_of(self, module: str) -> Form | None:
        """Return how a module of the checkpoint stores its matrix; None = plain. Raises BadCheckpoint."""

    def linear(self, name: str) -> LinearMethod:
        """See Scheme.linear; embeddings are plain."""
        modules = {} if name.startswith("embed_") else self.sources(name)
        forms = {shard: self.forms(module) for shard, module in modules.items()}
        if not any(forms.values()):
            return self._plain.linear(name)
        return PackedLinear(self.storage, name, lambda shard: forms[shard if shard in forms else ""])
