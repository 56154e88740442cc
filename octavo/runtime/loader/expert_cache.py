"""Experts stay in host memory; a device keeps copies of those that tokens take most.

Called by `load_own` and, between steps, by worker/hot_experts. A kernel reads each expert at its place: in a
copy on the device or, without one, in the host's memory, over the bus. So no step waits for a choice of
experts, and all can be captured. Layers count which experts are taken; now and then the counts come to the
host, and experts that are taken more than others get the slots of these. (Idea: llama.cpp's --moe-cache-mib.)
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from octavo.base.errors import ConfigError
from octavo.base.log import get_logger
from octavo.runtime.kernels.experts import Places
from octavo.runtime.layers.build import Layer
from octavo.runtime.models.interface import Family
from octavo.runtime.platforms.platform import CopyLane
from octavo.runtime.quantization.experts import HostExperts
from octavo.runtime.transfer import to_device

logger = get_logger(__name__)

_INTERVAL = 32  # steps between looks at the counts
_MOST_MOVED = 2  # experts of a layer at a time


def host_expert_bytes(model: nn.Module) -> int:
    """Return the bytes of the experts in host memory. Raises ConfigError if there are none."""
    total = sum(part.nbytes for method in _methods(model) for part in method.matrices)
    if not total:
        raise ConfigError("cpu_offload_experts: the first layers of this model have no experts.")
    return total


def buffer_bytes(model: nn.Module, room: int) -> int:
    """Return what the device keeps beside: copies, and memory for all experts of a layer."""
    methods = _methods(model)
    slots, largest = _num_slots(methods, room), max(map(_bytes, methods))
    return slots * sum(_bytes(method) // len(method.matrices[1]) for method in methods) + largest


class ExpertCache:
    """Moves the experts of a loaded model into locked memory; says where each lies."""

    def __init__(self, model: Family, device: torch.device, lane: CopyLane, room: int) -> None:
        """room: bytes for copies on the device"""
        self._methods, self._device, self._lane = _methods(model), device, lane
        self._num_slots = _num_slots(self._methods, room)
        memory = torch.empty(max(map(_bytes, self._methods)), dtype=torch.uint8, device=device)
        self._steps, self._seen = 0, [np.zeros(len(m.matrices[1])) for m in self._methods]
        self._owners: list[np.ndarray] = []
        """By layer: the expert in each slot."""
        self._arriving: tuple[Tensor, torch.cuda.Event | None] | None = None
        for method in self._methods:
            for parameter in method.parameters:
                data = parameter.data
                kept = lane.host_memory(data.nbytes).view(data.dtype).view(data.shape)
                parameter.live_in(kept.copy_(data))
            up, down = method.matrices
            method.copies = tuple(part[: self._num_slots].to(device, copy=True) for part in (up, down))  # type: ignore[assignment]
            method.counts = torch.zeros(len(down), dtype=torch.int32, device=device)
            method.shared_memory = memory
            self._owners.append(np.arange(self._num_slots))
        self.place()
        logger.info(
            "Experts of %d layers, %.3g GiB, are in host memory; the device has copies of %d of each %d.",
            len(self._methods),
            sum(map(_bytes, self._methods)) / 2**30,
            self._num_slots,
            len(self._seen[0]),
        )

    def place(self) -> None:
        """Write where all experts lie; needed when the device's copies are elsewhere, as behind a sleep."""
        for number in range(len(self._methods)):
            self._place(number)

    def rearrange(self) -> None:
        """Between steps: let experts that are taken often have the slots of others; waits for nothing."""
        self._steps += 1
        if self._arriving is None:
            if self._steps % _INTERVAL == 0:
                self._arriving = self._send_counts()
            return
        counts, event = self._arriving
        if event is not None and not event.query():  # type: ignore[no-untyped-call]
            return
        self._arriving = None
        for number, new in enumerate(counts.numpy()):
            self._seen[number] = self._seen[number] / 2 + new[: len(self._seen[number])]
            self._move(number)

    def _send_counts(self) -> tuple[Tensor, "torch.cuda.Event | None"]:
        counts = nn.utils.rnn.pad_sequence([method.counts for method in self._methods], batch_first=True)
        for method in self._methods:
            method.counts.zero_()
        if self._device.type == "cpu":
            return counts, None
        here = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        here.copy_(counts, non_blocking=True)
        return here, torch.cuda.current_stream().record_event()

    def _move(self, number: int) -> None:
        """Copy the most taken experts without a slot over the least taken ones that have one."""
        method, owners, seen = self._methods[number], self._owners[number], self._seen[number]
        outside = np.setdiff1d(np.arange(len(seen)), owners)
        wanted = outside[np.argsort(-seen[outside], kind="stable")][:_MOST_MOVED]
        slots = np.argsort(seen[owners], kind="stable")[:_MOST_MOVED]
        moved = False
        for expert, slot in zip(wanted.tolist(), slots.tolist(), strict=False):
            if seen[expert] <= 1.1 * seen[owners[slot]] + 1:
                break
            for copies, part in zip(method.copies, method.matrices, strict=True):
                copies[slot].copy_(part[expert], non_blocking=True)
            owners[slot], moved = expert, True
        if moved:
            self._place(number)

    def _place(self, number: int) -> None:
        """Write where each expert of a layer lies, in place: captured steps know the addresses."""
        method, owners = self._methods[number], self._owners[number]
        places = []
        for copies, part in zip(method.copies, method.matrices, strict=True):
            size, distance = part[0].numel(), part.data_ptr() - copies.data_ptr()
            own = distance // part.element_size() + np.arange(len(part)) * size
            own[owners] = np.arange(len(owners)) * size
            places.append(to_device(own.astype(np.int64), self._device))
        if not hasattr(method, "places"):
            method.places = Places(*(place.clone() for place in places))
            return
        for target, place in zip(method.places, places, strict=True):
            target.copy_(place)


def _methods(model: nn.Module) -> list[HostExperts]:
    layers = (layer for layer in model.modules() if isinstance(layer, Layer))
    every = (getattr(method, "inner", method) for layer in layers for method in layer.matrices)
    return [method for method in every if isinstance(method, HostExperts)]


def _bytes(method: HostExperts) -> int:
    return sum(part.nbytes for part in method.matrices)


def _num_slots(methods: Sequence[HostExperts], room: int) -> int:
    """Return how many experts of each layer have a copy: at least one."""
    counts = [len(method.matrices[1]) for method in methods]
    each = sum(_bytes(method) // count for method, count in zip(methods, counts, strict=True))
    return max(1, min(*counts, room // each))
