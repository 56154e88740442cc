"""Methods for experts: matrices of plain numbers, and packed ones.

On a GPU a kernel multiplies plain matrices; blocks are unpacked for it as they are loaded. On a CPU the
kernel for blocks multiplies, to which plain numbers are blocks of one.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from octavo.runtime.kernels.experts import ExpertForm, Places, Routing, Shared, Stacks
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.quantization.blocks import Blocks, blocks_of_one, stack
from octavo.runtime.quantization.method import ExpertsMethod, Storage
from octavo.runtime.quantization.parameter import (
    BlockParameter,
    DenseParameter,
    Layout,
    MakeBlocks,
    Parameter,
)

_ALL_TIMES = 8  # pairs of tokens and experts per expert, from which on all are copied


class DenseExperts(ExpertsMethod):
    """Multiplies weights and activations of one type."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._wholes: tuple[Tensor, Tensor] | None = None
        """The matrices, with room behind them."""

    def create(self, up: Layout, down: Layout) -> dict[str, Parameter]:
        storage = self._storage
        self._up, self._down = (
            DenseParameter(layout, storage.arena.empty(layout.shape, storage.weight_dtype, storage.device))
            for layout in (up, down)
        )
        return {"up.weight": self._up, "down.weight": self._down}

    def apply(self, x: Tensor, routing: Routing, form: ExpertForm, shared: Shared | None = None) -> Tensor:
        return self._storage.experts.dense_experts(x, routing, *self.matrices, form, shared)

    def after_load(self) -> None:
        if self.num_spare is not None:
            count = len(self._down.data)
            wholes = []
            for parameter in (self._up, self._down):
                data = parameter.data
                wholes.append(pad_rows(data, len(data) // count * self.num_spare))
                parameter.live_in(wholes[-1][: len(data)])
            self._wholes = wholes[0], wholes[1]

    def stacks(self) -> Stacks:
        return _plain_stacks(*self.matrices)

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return the weights: [experts, gate and up, inputs], [experts, outputs, intermediate]."""
        up, down = self._wholes or (self._up.data, self._down.data)
        return up.view(len(down), -1, down.shape[1]), down

    def slots(self) -> list[Tensor]:
        return list(self.matrices)


class HostExperts(DenseExperts):
    """Multiplies matrices in host memory, of some of which the device has copies.

    The device reads both where they lie. For many tokens, which need most experts several times, it gets all
    first, into memory that layers share.
    """

    copies: tuple[Tensor, Tensor]
    """Stacks [slots, …] on the device."""
    places: Places
    counts: Tensor
    """[experts] int32: pairs of tokens and experts since somebody looked."""
    shared_memory: Tensor | None = None
    """Bytes on the device for all matrices of a layer; None until there are copies."""

    def create(self, up: Layout, down: Layout) -> dict[str, Parameter]:
        if self._storage.device.type != "meta":
            self._storage = replace(self._storage, device=torch.device("cpu"))
        return super().create(up, down)

    @property
    def parameters(self) -> tuple[DenseParameter, DenseParameter]:
        """Return what owns the matrices."""
        return self._up, self._down

    def apply(self, x: Tensor, routing: Routing, form: ExpertForm, shared: Shared | None = None) -> Tensor:
        if self.shared_memory is None:
            return super().apply(x, routing, form, shared)
        if routing.ids.numel() >= _ALL_TIMES * len(self.counts):
            up, down = (place.copy_(part, non_blocking=True) for part, place in self._all())
            return self._storage.experts.dense_experts(x, routing, up, down, form, shared)
        ids, count = routing.ids.flatten(), len(self.counts)  # -1: other ranks'; anything while kernels load
        self.counts.scatter_add_(0, ids.clamp(0, count - 1).long(), ((ids >= 0) & (ids < count)).int())
        placed = self._storage.experts.placed_experts
        assert placed is not None
        return placed(x, routing, *self.copies, form, shared, self.places)

    def _all(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert self.shared_memory is not None
        start = 0
        for part in self.matrices:
            room = self.shared_memory[start : start + part.nbytes]
            start += part.nbytes
            yield part, room.view(part.dtype).view(part.shape)


class BlockExperts(ExpertsMethod):
    """Multiplies matrices in blocks; those of one projection have one type."""

    def __init__(
        self, storage: Storage, parameter: MakeBlocks = BlockParameter, *, rounds_inputs: bool = False
    ) -> None:
        """Begin empty. parameter: what takes the tensors of the checkpoint; rounds_inputs: see Form"""
        self._storage, self._parameter_type, self._rounds_inputs = storage, parameter, rounds_inputs
        self._stacks: Stacks | tuple[()] = ()

    def create(self, up: Layout, down: Layout) -> dict[str, Parameter]:
        self._up, self._down = (self._parameter_type(layout, self._storage.device) for layout in (up, down))
        return {"up.weight": self._up, "down.weight": self._down}

    def after_load(self) -> None:
        up = self._up.take()
        self._keep(*(stack(parts, self._storage.arena) for parts in (up[::2], up[1::2], self._down.take())))

    def apply(self, x: Tensor, routing: Routing, form: ExpertForm, shared: Shared | None = None) -> Tensor:
        assert self._stacks
        return self._storage.experts.block_experts(x, routing, self._stacks, form, shared)

    def slots(self) -> list[Tensor]:
        parts = (tensor for part in self._stacks for tensor in (part.blocks, part.scales))
        return [tensor for tensor in parts if tensor is not None]

    def stacks(self) -> Stacks:
        assert self._stacks
        return self._stacks

    def describe(self) -> list[str]:
        """Return a line for each stack."""
        stacks = getattr(self, "_stacks", ())
        return [
            f"{len(part.blocks)} experts of {part._replace(blocks=part.blocks[0]).describe()}"
            for part in stacks
        ]

    def _keep(self, gate: Blocks, up: Blocks, down: Blocks) -> None:
        if (room := self.num_spare) is not None:
            gate, up, down = (Blocks(pad_rows(part.data, room), part.type) for part in (gate, up, down))
        self._stacks = self._arranged(Stacks(self._pack(gate), self._pack(up), self._pack(down)))

    def _arranged(self, stacks: Stacks) -> Stacks:
        """Return all stacks as the kernel multiplies them, or all as they are."""
        arrange, dtype = self._storage.experts.arrange, self._storage.compute_dtype
        if arrange is None:
            return stacks
        made = Stacks(*(arrange(part, dtype) for part in stacks))
        gate, up, down = (None if part.scales is None else part.scales.shape for part in made)
        return made if gate == up and (gate is None) == (down is None) else stacks

    def _pack(self, stacked: Blocks) -> Packed:
        name = stacked.type.name
        return Packed(stacked.data, name, self._storage.precision_of(name, rounds=self._rounds_inputs))


class WidenedExperts(BlockExperts):
    """Multiplies weights of any width and float32 activations, as blocks of one number."""

    def create(self, up: Layout, down: Layout) -> dict[str, Parameter]:
        self._plain = DenseExperts(self._storage)
        return self._plain.create(up, down)

    def after_load(self) -> None:
        gate_up, down = self._plain.matrices
        self._keep(*(blocks_of_one(part) for part in (*gate_up.chunk(2, 1), down)))


class UnpackedExperts(BlockExperts):
    """Unpacks blocks as they are loaded, where no fast kernel multiplies them as they are."""

    _matrices: tuple[Tensor, Tensor] | None = None
    _told: tuple[str, ...] = ()

    def after_load(self) -> None:
        super().after_load()
        assert self._stacks
        if self._stacks.gate.type_name == "MXFP4" or self._stacks.gate.scales is not None:  # kernels do
            return
        self._told = tuple(f"{line}: unpacked once, at the start" for line in super().describe())
        gate, up, down = (self._unpack(part) for part in self._stacks)
        self._matrices = torch.cat([gate, up], 1), down
        self._stacks = ()

    def apply(self, x: Tensor, routing: Routing, form: ExpertForm, shared: Shared | None = None) -> Tensor:
        if self._matrices is None:
            return super().apply(x, routing, form, shared)
        return self._storage.experts.dense_experts(x, routing, *self._matrices, form, shared)

    def slots(self) -> list[Tensor]:
        return super().slots() if self._matrices is None else list(self._matrices)

    def stacks(self) -> Stacks:
        return super().stacks() if self._matrices is None else _plain_stacks(*self._matrices)

    def describe(self) -> list[str]:
        return list(self._told) or super().describe()

    def _unpack(self, matrices: Packed) -> Tensor:
        unpack, dtype = self._storage.kernels.block_dequantize, self._storage.compute_dtype
        return torch.stack([unpack(matrices._replace(blocks=part)).to(dtype) for part in matrices.blocks])


def pad_rows(x: Tensor, count: int) -> Tensor:
    """Return a copy of x with so many zeros more along its first axis."""
    return torch.cat([x, x.new_zeros((count, *x.shape[1:]))])


def _plain_stacks(up: Tensor, down: Tensor) -> Stacks:
    """Return plain matrices as such of blocks of one. up: [experts, gate and up, inputs]"""
    gate, value = up.chunk(2, 1)
    return Stacks(*(Packed((b := blocks_of_one(part)).data, b.type.name) for part in (gate, value, down)))


def make_block_experts(
    storage: Storage, parameter: MakeBlocks = BlockParameter, *, rounds_inputs: bool = False
) -> ExpertsMethod:
    """Return the device's method for experts in blocks."""
    kind = BlockExperts if storage.device.type == "cpu" else UnpackedExperts
    return kind(storage, parameter, rounds_inputs=rounds_inputs)
