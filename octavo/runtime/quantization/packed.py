"""`PackedLinear` multiplies matrices that a checkpoint stores as several tensors, in a `Form` per shard.

A scheme says by the name of a module in the checkpoint how its matrix is stored: as a `Form`, or plain
(None). Shards of one projection may differ (q in 8 bits, k in 4, v plain): each keeps its own scales, and
becomes blocks when everything is loaded.
"""

from abc import abstractmethod
from collections.abc import Callable, Container
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.config.engine import EngineConfig
from octavo.runtime.kernels.activations import Activation
from octavo.runtime.quantization.blocks import Blocks, blocks_of_one
from octavo.runtime.quantization.forms import FLOATS, Expected, Form, StoredParameter, blaming, part_of
from octavo.runtime.quantization.gguf import GGUFLinear
from octavo.runtime.quantization.grouped import outline, pack
from octavo.runtime.quantization.method import ExpertsMethod, LinearMethod, Scheme, Sources, Storage
from octavo.runtime.quantization.packed_experts import PackedExperts
from octavo.runtime.quantization.packed_layout import PackedLayout
from octavo.runtime.quantization.parameter import Layout, Parameter, Shard
from octavo.runtime.quantization.stored_config import stored_quantization
from octavo.runtime.quantization.unquantized import Unquantized

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
            form, part = self._form_of(shard.name), part_of(single)
            self._rounds_inputs |= form is not None and form.rounds_inputs
            with blaming(self._name, shard):
                tensors = PLAIN if form is None else form.tensors(part)
            for suffix, expected in tensors.items():
                self._stored.setdefault(suffix, StoredParameter(single)).expect(single, expected)
        return dict(self._stored)

    def after_load(self) -> None:
        """Pack shard by shard; what was stored is let go."""
        segments: list[Blocks] = []
        for shard in self._layout.shards:
            with blaming(self._name, shard):
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
        form, part = self._form_of(shard.name), part_of(replace(self._layout, shards=(shard,)))
        if form is not None and self._storage.device.type == "meta":
            return outline(*form.packed_as, part.outputs.size, part.inputs.size), None
        stored = {
            suffix: parameter.parts[shard.name]
            for suffix, parameter in self._stored.items()
            if shard.name in parameter.parts
        }
        if form is None:
            return blocks_of_one(stored["weight"].to(self._storage.weight_dtype).contiguous()), None
        return pack(form.read(stored, part))

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


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


class PackedScheme(Scheme):
    """Serves checkpoints whose config says of every module how it is stored."""

    METHODS: ClassVar[tuple[str, ...]]
    """The values of `quant_method` that the scheme reads."""
    NEEDLESS: ClassVar[Container[str]] = ()
    """Last words of the names of tensors that the scheme leaves out."""

    def __init__(self, storage: Storage, config: EngineConfig, sources: Sources) -> None:
        super().__init__(storage, config, sources)
        self.stored = stored_quantization(config)
        self.forms = cache(self.form_of)
        self._plain = Unquantized(storage, config, sources)

    @classmethod
    def matches(cls, config: EngineConfig) -> bool:
        return stored_quantization(config).get("quant_method") in cls.METHODS

    @classmethod
    def stored_name(cls, name: str) -> str | None:
        return None if name.rpartition(".")[2] in cls.NEEDLESS else name

    def experts(self, name: str) -> ExpertsMethod:
        """See Scheme.experts; the first expert says whether they are plain."""
        sources = {projection: self.sources(f"{name}.{projection}") for projection in ("up", "down")}
        if not all(sources.values()):
            return super().experts(name)

        def form_of(projection: str, shard: str) -> Form | None:
            expert, _, part = shard.partition(".")
            return self.forms(sources[projection]["*" + (part and f".{part}")].replace("*", expert))

        if form_of("down", "0") is None:
            return self._plain.experts(name)

        def packed_form(projection: str, shard: str) -> Form:
            if form := form_of(projection, shard):
                return form
            raise BadCheckpoint("plain beside packed experts: quantize all of a layer, or none")

        return PackedExperts(self.storage, name, packed_form)

    def router(self, name: str) -> LinearMethod:
        """See Scheme.router; checkpoints keep it plain, whether their config says so or not."""
        return self._plain.linear(name)

    @abstractmethod
    def form_of(self, module: str) -> Form | None:
        """Return how a module of the checkpoint stores its matrix; None = plain. Raises BadCheckpoint."""

    def linear(self, name: str) -> LinearMethod:
        """See Scheme.linear; embeddings are plain."""
        forms = self._forms_of(name)
        if not any(forms.values()):
            return self._plain.linear(name)
        return PackedLinear(self.storage, name, lambda shard: forms[shard if shard in forms else ""])

    def is_packed(self, name: str) -> bool:
        return any(self._forms_of(name).values())

    def _forms_of(self, name: str) -> dict[str, Form | None]:
        modules = {} if name.startswith("embed_") else self.sources(name)
        return {shard: self.forms(module) for shard, module in modules.items()}
