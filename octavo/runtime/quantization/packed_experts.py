"""`PackedExperts` multiplies experts that a checkpoint stores as several tensors, each matrix in a `Form`.

They may come one by one, or as stacks; all matrices of a projection are stored alike, and become one stack of
blocks. No wide copy is kept.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.runtime.quantization.blocks import Blocks
from octavo.runtime.quantization.experts import BlockExperts
from octavo.runtime.quantization.forms import Form, StoredParameter, blaming, part_of
from octavo.runtime.quantization.grouped import Grouped, outline, pack
from octavo.runtime.quantization.method import Storage
from octavo.runtime.quantization.parameter import Layout, Parameter, Shard, Stored

FormOfExpert = Callable[[str, str], Form]
"""Takes "up" or "down" and a shard's name; returns how that matrix is stored."""


class StoredStack(StoredParameter):
    """Keeps tensors of one name of many matrices: each by itself, or some along a first axis."""

    is_movable = True  # whole rows are

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._stack = layout

    def load(self, tensor: Stored, name: str = "") -> None:
        shards = self._stack.select(name)
        if len(shards) == 1 or not isinstance(tensor, Tensor):
            super().load(tensor, name)
            return
        if len(tensor) != len(shards):
            raise BadCheckpoint(f"expected {len(shards)} matrices, found {list(tensor.shape)}")
        for shard, part in zip(shards, tensor, strict=True):
            super().load(part, shard.name)


class PackedExperts(BlockExperts):
    """Packs stacks once everything is loaded."""

    def __init__(self, storage: Storage, name: str, form_of: FormOfExpert) -> None:
        """name: of the layer, for messages"""
        super().__init__(storage)
        self._name, self._form_of = name, form_of
        self._stored: dict[str, dict[str, StoredStack]] = {"up": {}, "down": {}}

    def create(self, up: Layout, down: Layout) -> dict[str, Parameter]:
        self._layouts = {"up": up, "down": down}
        for projection, layout in self._layouts.items():
            for shard in layout.shards:
                single = _single(layout, shard)
                form = self._form_of(projection, shard.name)
                self._rounds_inputs |= form.rounds_inputs
                with blaming(f"{self._name}.{projection}", shard):
                    tensors = form.tensors(part_of(single))
                for suffix, expected in tensors.items():
                    stack = self._stored[projection].setdefault(suffix, StoredStack(layout))
                    stack.expect(single, expected)
        return {
            f"{p}.{suffix}": stack for p, stored in self._stored.items() for suffix, stack in stored.items()
        }

    def after_load(self) -> None:
        up, down = self._layouts["up"].shards, self._layouts["down"].shards
        stacks = self._pack_all("up", up[::2]), self._pack_all("up", up[1::2]), self._pack_all("down", down)
        for projection, sizes in (("up", stacks[:2]), ("down", stacks[2:])):
            for parameter in self._stored[projection].values():
                parameter.parts, parameter.num_bytes = {}, 0
            first = next(iter(self._stored[projection].values()))
            first.num_bytes = sum(stack.data.nbytes for stack in sizes)
        self._keep(*stacks)

    def _pack_all(self, projection: str, shards: tuple[Shard, ...]) -> Blocks:
        """Read and pack the matrices of these shards: [experts, outputs, bytes per row]."""
        if self._storage.device.type == "meta":
            part = part_of(_single(self._layouts[projection], shards[0]))
            kind = self._form_of(projection, shards[0].name).packed_as
            made = outline(*kind, len(shards) * part.outputs.size, part.inputs.size, pads=False)
            return Blocks(made.data.view(len(shards), part.outputs.size, -1), made.type)
        read = []
        for shard in shards:
            parameters = self._stored[projection].items()
            stored = {s: p.parts.pop(shard.name) for s, p in parameters if shard.name in p.parts}
            part = part_of(_single(self._layouts[projection], shard))
            with blaming(f"{self._name}.{projection}", shard):
                read.append(self._form_of(projection, shard.name).read(stored, part))
        name = f"{self._name}.{projection}"
        with blaming(name, shards[0]._replace(name="")):
            blocks, places = pack(_joined(read), pads=False)
        if places is not None:
            raise Unsupported(
                f"{name}: inputs in an order of their own (desc_act), or no multiple of 32 of them on each "
                "rank, are not supported in experts. Quantize without act-order, or use a smaller "
                "tensor_parallel_size."
            )
        data = blocks.data.view(len(shards), -1, blocks.data.shape[1])
        place = self._storage.arena.empty(tuple(data.shape), torch.uint8, self._storage.device)
        return Blocks(place.copy_(data), blocks.type)


def _single(layout: Layout, shard: Shard) -> Layout:
    """Return the layout of one matrix [outputs, inputs] of a stack."""
    return Layout((shard,), layout.others[1:], layout.split_axis - 1)


def _joined(read: list[Grouped]) -> Grouped:
    """Return matrices one below the other. Raises BadCheckpoint where they are not stored alike."""
    first = read[0]
    alike = all(other.kind == first.kind and torch.equal(other.groups, first.groups) for other in read)
    zeros = [other.zeros for other in read]
    if not alike or (any(z is None for z in zeros) and any(z is not None for z in zeros)):
        raise BadCheckpoint(
            "its experts are not all stored alike: quantize all with the same bits and groups"
        )
    return replace(
        first,
        codes=torch.cat([other.codes for other in read]),
        scales=torch.cat([other.scales for other in read]),
        zeros=None if first.zeros is None else torch.cat([z for z in zeros if z is not None]),
    )
