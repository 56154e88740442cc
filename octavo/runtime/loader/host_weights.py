"""Chosen layers keep their matrices in host memory; a device gets them just ahead of use.

Called by `load_own`. The matrices of a layer lie in one piece of host memory, and its parameters are views of
a buffer on the device. There is a buffer for each layer that is copied ahead, and one for the layer that
computes; layers take turns. A step begins with the first copies and each layer that is done makes room for
another, so nothing is under way between two steps: a step can be recorded as a whole, copies and all.

Norms and biases, embedding and head stay on the device. (Idea: vLLM's prefetching offloader; FlexGen,
https://arxiv.org/abs/2303.06865.)
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

import torch
from torch import Tensor, nn

from octavo.base.errors import ConfigError
from octavo.base.log import get_logger
from octavo.config.engine import EngineConfig
from octavo.config.parallel import ParallelConfig
from octavo.runtime.layers.build import named_parameters
from octavo.runtime.models.interface import Family
from octavo.runtime.platforms import cpu
from octavo.runtime.platforms.platform import CopyLane
from octavo.runtime.quantization.parameter import DenseParameter

_log = get_logger(__name__)

_GIB = 1 << 30
_ALIGNMENT = 256


def wants_host_weights(config: EngineConfig) -> bool:
    """Return True if some layers' weights are to stay in host memory."""
    return bool(config.parallel.cpu_offload_gb or config.parallel.offload_group_size)


def choose_layers(parallel: ParallelConfig, sizes: list[int]) -> frozenset[int]:
    """Return the layers that the options name: the last of each group, or as many as make up the bytes.

    sizes: bytes of each layer's matrices. Those chosen by bytes lie evenly between the others, during whose
    work they are copied. Raises ConfigError when the host's memory is too small.
    """
    num_layers = len(sizes)
    if group := parallel.offload_group_size:
        last = group - parallel.offload_num_in_group
        chosen = frozenset(layer for layer in range(num_layers) if layer % group >= last)
    else:
        number = min(num_layers, ceil(parallel.cpu_offload_gb * _GIB * num_layers / sum(sizes)))
        chosen = frozenset((place + 1) * num_layers // number - 1 for place in range(number))
    lower = "cpu_offload_gb (or offload_num_in_group)"
    check_room(f"The weights of {len(chosen)} layers", sum(sizes[layer] for layer in chosen), lower)
    return chosen


def check_room(what: str, needed: int, option: str) -> None:
    """Raise ConfigError, which advises to lower an option, when the host's memory is too small."""
    if needed > (free := cpu.free_bytes()):
        raise ConfigError(
            f"{what} take {needed / _GIB:.3g} GiB of host memory per GPU; {free / _GIB:.3g} GiB are free. "
            f"Lower {option}."
        )


def layer_bytes(model: Family) -> list[int]:
    """Return the bytes of each layer's matrices on this rank."""
    return [sum(matrix.data.nbytes for matrix in _matrices(layer)) for layer in _layers(model)]


class HostWeights:
    """Moves the matrices of some layers of a loaded model. The model's hooks keep this object."""

    def __init__(
        self, model: Family, layers: Sequence[int], num_ahead: int, device: torch.device, lane: CopyLane
    ) -> None:
        """Take over `layers`, ascending. num_ahead: how many of them are copied before it is their turn."""
        stack = _layers(model)
        chosen = [stack[layer] for layer in layers]
        self._lane = lane
        self._sources = [_gather(_matrices(layer), lane) for layer in chosen]
        num_buffers, size = min(num_ahead + 1, len(chosen)), max(len(source) for source in self._sources)
        self._buffers = torch.empty((num_buffers, size), dtype=torch.uint8, device=device)
        self._arrivals: list[Callable[[], None]] = [_at_once] * len(chosen)
        stack[0].register_forward_pre_hook(self._begin)
        for place, layer in enumerate(chosen):
            matrices = _matrices(layer)
            for matrix, view in zip(
                matrices, _views(matrices, self._buffers[place % num_buffers]), strict=True
            ):
                matrix.live_in(view)
            layer.register_forward_pre_hook(partial(self._await, place))
            layer.register_forward_hook(partial(self._follow, place))
        _log.info(
            "Weights of %d of %d layers, %.3g GiB, are in host memory; the device has %d x %.3g GiB for it.",
            len(chosen),
            len(stack),
            sum(len(source) for source in self._sources) / _GIB,
            num_buffers,
            size / _GIB,
        )

    def _begin(self, module: nn.Module, inputs: object) -> None:
        """Fill the buffers before a step's first layer."""
        for place in range(len(self._buffers)):
            self._copy(place)

    def _await(self, place: int, module: nn.Module, inputs: object) -> None:
        """Wait, before a layer, for its weights."""
        self._arrivals[place]()

    def _follow(self, place: int, module: nn.Module, inputs: object, output: object) -> None:
        """Copy the weights of a later layer into the buffer of one that is done."""
        if place + len(self._buffers) < len(self._sources):
            self._copy(place + len(self._buffers))

    def _copy(self, place: int) -> None:
        source = self._sources[place]
        target = self._buffers[place % len(self._buffers)][: len(source)]
        self._arrivals[place] = self._lane.copy(target, source)


def _layers(model: Family) -> nn.ModuleList:
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    return layers


def _matrices(layer: nn.Module) -> list[DenseParameter]:
    parameters = named_parameters(layer).values()
    return [p for p in parameters if isinstance(p, DenseParameter) and p.layout.others]


def _gather(matrices: list[DenseParameter], lane: CopyLane) -> Tensor:
    """Move them into one piece of the host's memory, in their order: [bytes] uint8."""
    memory = lane.host_memory(sum(_room(matrix) for matrix in matrices))
    for matrix, place in zip(matrices, _views(matrices, memory), strict=True):
        matrix.live_in(place.copy_(matrix.data))
    return memory


def _views(matrices: list[DenseParameter], memory: Tensor) -> list[Tensor]:
    views, start = [], 0
    for matrix in matrices:
        data = matrix.data
        views.append(memory[start : start + data.nbytes].view(data.dtype).view(data.shape))
        start += _room(matrix)
    return views


def _room(matrix: DenseParameter) -> int:
    return -(-matrix.data.nbytes // _ALIGNMENT) * _ALIGNMENT


def _at_once() -> None:
    """Return at once: no copy has begun."""
