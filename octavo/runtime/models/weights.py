"""A `WeightMap` maps the names in a checkpoint to our parameters, as data.

A rule maps a stem, with `*` for numbers (the layer's, a head's), to the module that takes it; ".weight" and
".bias" carry over.

    "model.layers.*.self_attn.q_proj": to("layers.*.attention.qkv", "q")
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.runtime.layers.build import Stored
from octavo.runtime.models.arch import Arch, LayerArch

Transform = Callable[[Any, LayerArch | None], Stored]
"""Takes a whole `Stored` and, if it belongs to a layer, that layer."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Target(NamedTuple):
    """A Target is the place of a tensor.

    module: our module's name; shard: which part of a fused weight, "" = all; transform: to our layout
    """

    module: str
    shard: str = ""
    transform: Transform | None = None

    def convert(self, tensor: Stored, arch: Arch) -> Stored:
        """Return the tensor in our layout; as it is if it belongs to a layer that the model has not."""
        if self.transform is None:
            return tensor
        stack, _, rest = self.module.partition(".")
        if stack != "layers":
            return self.transform(tensor, None)
        index = int(rest.partition(".")[0])
        return self.transform(tensor, arch.layers[index]) if index < len(arch.layers) else tensor


to = Target


@dataclass(frozen=True)
class WeightMap:
    """A WeightMap finds targets by name.

    rules: by stem; prefix: what may stand before every name; ignored: patterns of harmless tensors
    """

    rules: Mapping[str, Target]
    prefix: str = ""
    ignored: tuple[str, ...] = ()

    def find(self, name: str) -> Target | None:
        """Return the target of tensor `name`, its module completed to a parameter's name; None if unknown."""
        stem, _, suffix = name.removeprefix(self.prefix).rpartition(".")
        target = self.rules.get(_NUMBER.sub("*", stem))
        if target is None:
            return None
        numbers = iter(_NUMBER.findall(stem))
        module, shard = (re.sub(r"\*", lambda _: next(numbers), part) for part in target[:2])
        return Target(f"{module}.{suffix}", shard, target.transform)

    def ignores(self, name: str) -> bool:
        """Return True if `name` may be left out."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    def replace(self, rules: Mapping[str, Target]) -> "WeightMap":
        """Return the same map with some rules added or replaced."""
        return WeightMap({**self.rules, **rules}, self.prefix, self.ignored)


def transpose(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    """Turn [inputs, outputs], as GPT-2 stores it, to [outputs, inputs]; vectors stay."""
    del layer
    return tensor.t()


def ungroup_qkv(tensor: Stored, layer: LayerArch | None) -> Stored:
    """Turn rows grouped by key head (its queries, the key, the value) to all queries, all keys, all values.

    Whole rows move, so packed ones stay packed. A wrong number of rows is left for the parameter to refuse.
    """
    assert layer is not None
    heads = layer.attention
    num_rows = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    if tensor.shape[:1] != (num_rows,):
        return tensor
    rows = torch.arange(num_rows).view(heads.num_kv_heads, -1, heads.head_dim)
    queries, keys, values = rows[:, :-2], rows[:, -2], rows[:, -1]
    return tensor.index_select(0, torch.cat([queries.flatten(), keys.flatten(), values.flatten()]))
