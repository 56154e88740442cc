"""The memory of the KV cache: which layers share a block table, and the tensors behind the blocks."""

import mmap
from math import prod

import torch

from octavo.base.errors import Unsupported
from octavo.messages.kv import CachePlan, KVCacheGroup, KVCacheSpec


def group_layers(specs: list[KVCacheSpec]) -> list[KVCacheGroup]:
    """Group the attention layers (given by layer id) so that one pool of blocks serves them all.

    Layers of one kind form groups of as many layers as the rarest kind has. Gemma 3 270M, with 3 global and
    15 local layers, becomes one global and five local groups of 3 layers; a model of one kind becomes one
    group. The idea is that of vLLM's hybrid cache manager.
    """
    kinds: dict[KVCacheSpec, list[int]] = {}
    for layer_id, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer_id)
    if len({spec.bytes_per_token for spec in kinds}) > 1:
        sizes = ", ".join(f"{s.num_kv_heads} heads x {s.head_dim}" for s in kinds)
        raise Unsupported(
            f"Layers with KV caches of different sizes ({sizes}) cannot share one pool of blocks yet."
        )
    size = min(len(layers) for layers in kinds.values())
    return [
        KVCacheGroup(spec, tuple(layers[start : start + size]))
        for spec, layers in kinds.items()
        for start in range(0, len(layers), size)
    ]


class KVTensors:
    """The allocated cache.

    by_layer:        cache of each layer, [num_blocks, 2, block_size, num_kv_heads, head_dim]; layer i of
                     every group has the same tensor
    group_of_layer:  index of each layer's group
    """

    def __init__(self, plan: CachePlan, dtype: torch.dtype, device: torch.device) -> None:
        spec = plan.groups[0].spec
        shape = (plan.num_blocks, 2, plan.block_size, spec.num_kv_heads, spec.head_dim)
        count = max(len(group.layers) for group in plan.groups)
        self.tensors = [_zeros(shape, dtype, device) for _ in range(count)]
        num_layers = sum(len(group.layers) for group in plan.groups)
        self.by_layer = [self.tensors[0]] * num_layers
        self.group_of_layer = [0] * num_layers
        for index, group in enumerate(plan.groups):
            for tensor, layer_id in zip(self.tensors, group.layers, strict=False):
                self.by_layer[layer_id] = tensor
                self.group_of_layer[layer_id] = index

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to) in every layer."""
        if not copies:
            return
        source = torch.tensor([c[0] for c in copies], device=self.tensors[0].device)
        target = torch.tensor([c[1] for c in copies], device=self.tensors[0].device)
        for tensor in self.tensors:
            tensor[target] = tensor[source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros; on CPU its pages take memory only once they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
