"""A `WeightMap` maps the names in a checkpoint to our parameters, as data.

A rule maps a stem, with `*` for numbers (the layer's, an expert's; others may stand as they are), to the
module that takes it; ".weight" and ".bias" carry over. Tensors without such an end are mapped by their whole
name to a parameter.

    "model.layers.*.self_attn.q_proj": to("layers.*.attention.qkv", "q")
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.runtime.layers.build import Stored
from octavo.runtime.layers.self_attention import HeadsArch
from octavo.runtime.models.arch import Arch, LayerArch

Transform = Callable[[Any, LayerArch | None], Stored]
"""Takes a whole `Stored` and, if it belongs to a layer, that layer."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a tensor or a module belongs to."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


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
        index = layer_of(self.module)
        if index is None:
            return self.transform(tensor, None)
        return self.transform(tensor, arch.layers[index]) if index < len(arch.layers) else tensor


to = Target


def qkv(stem: str, module: str, names: Sequence[str] = "qkv") -> dict[str, Target]:
    """Return the rules of queries, keys and values that our `module` has in one. stem: ? for their names"""
    return {stem.replace("?", name): to(module, shard) for name, shard in zip(names, "qkv", strict=True)}


@dataclass(frozen=True)
class WeightMap:
    """A WeightMap finds targets by name.

    rules: by stem; prefix: what may stand before every name, once or more often, several divided by |
    ignored: patterns of harmless tensors
    """

    rules: Mapping[str, Target]
    prefix: str = ""
    ignored: tuple[str, ...] = ()

    def find(self, name: str) -> Target | None:
        """Return the target of tensor `name`, its module completed to a parameter's name; None if unknown.

        PEFT calls a module with adapters base_layer.
        """
        name = name.replace(".base_layer.", ".")
        for prefix in self.prefix.split("|"):
            while prefix and name.startswith(prefix):
                name = name.removeprefix(prefix)
        stem, dot, suffix = name.rpartition(".")
        pattern = _NUMBER.sub("*", name)
        target = self.rules.get(pattern) or self.rules.get(pattern.rpartition(".")[0]) or self.rules.get(stem)
        if target is None:
            return None
        if pattern in self.rules:
            stem, dot, suffix = name, "", ""
        numbers = iter(_NUMBER.findall(stem))
        module, shard = (re.sub(r"\*", lambda _: next(numbers), part) for part in target[:2])
        return Target(module + dot + suffix, shard, target.transform)

    def sources(self, module: str) -> dict[str, str]:
        """Return the modules of the checkpoint whose matrices make up our `module`, by shard.

        Of experts, a `*` in both stands for an expert.
        """
        pattern, numbers, found = _NUMBER.sub("*", module), _NUMBER.findall(module), {}
        for stem, target in self.rules.items():
            if target.module == pattern and stem.count("*") - len(numbers) == target.shard.count("*"):
                name = stem.replace("*", "%s", len(numbers)) % tuple(numbers)
                found[target.shard] = name if module == "lm_head" else self.prefix.partition("|")[0] + name
        return found

    def ignores(self, name: str) -> bool:
        """Return True if `name` may be left out."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    def replace(self, rules: Mapping[str, Target]) -> "WeightMap":
        """Return the same map with some rules added or replaced."""
        return WeightMap({**self.rules, **rules}, self.prefix, self.ignored)

    def for_pooling(self, rules: Mapping[str, Target], *, has_head: bool = False) -> "WeightMap":
        """Return the map with these rules; without the head over the vocabulary, unless that is used."""
        if has_head and not rules:
            return self
        heads = [stem for stem, target in self.rules.items() if target.module == "lm_head"]
        kept = {stem: target for stem, target in self.rules.items() if stem not in heads}
        needless = [*self.ignored, *(rf"^{re.escape(stem)}\." for stem in heads)]
        ignored = tuple(p for p in needless if not any(re.search(p, f"{stem}.weight") for stem in rules))
        return WeightMap({**kept, **rules}, self.prefix, ignored)


def transpose(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    """Turn [inputs, outputs], as GPT-2 stores it, to [outputs, inputs]; vectors stay."""
    return tensor.t()


def swap_halves(tensor: Stored, layer: LayerArch | None) -> Stored:
    """Turn rows of (up, gate) to those of (gate, up)."""
    del layer
    half = tensor.shape[0] // 2
    return tensor.index_select(0, torch.arange(2 * half).roll(half))


def ungroup_qkv(tensor: Stored, layer: LayerArch | None) -> Stored:
    """Turn rows grouped by key head (its queries, the key, the value) to all queries, all keys, all values.

    Whole rows move, so packed ones stay packed. A wrong number of rows is left for the parameter to refuse.
    """
    assert layer is not None
    heads = layer.attention
    assert isinstance(heads, HeadsArch)
    num_rows = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    if tensor.shape[:1] != (num_rows,):
        return tensor
    rows = torch.arange(num_rows).view(heads.num_kv_heads, -1, heads.head_dim)
    queries, keys, values = rows[:, :-2], rows[:, -2], rows[:, -1]
    return tensor.index_select(0, torch.cat([queries.flatten(), keys.flatten(), values.flatten()]))
