"""`WeightMap`: from the names in a checkpoint to our parameters, as data.

A rule maps a stem, with `*` for the layer's number, to the module that takes it; ".weight" and ".bias" carry
over.

    "model.layers.*.self_attn.q_proj": to("layers.*.attention.qkv", "q")
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from octavo.runtime.models.arch import Arch
from octavo.runtime.quantization.blocks import Blocks

Stored = Tensor | Blocks
Transform = Callable[[Stored, Arch], Stored]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Target(NamedTuple):
    """module: our module's name; shard: which part of a fused weight, "" = all; transform: to our layout."""

    module: str
    shard: str = ""
    transform: Transform | None = None


to = Target


@dataclass(frozen=True)
class WeightMap:
    """rules: by stem; prefix: what may stand before every name; ignored: patterns of harmless tensors."""

    rules: Mapping[str, Target]
    prefix: str = ""
    ignored: tuple[str, ...] = ()

    def find(self, name: str) -> Target | None:
        """Where tensor `name` goes, the target's module completed to a parameter's name; None if unknown."""
        stem, _, suffix = name.removeprefix(self.prefix).rpartition(".")
        number = _NUMBER.search(stem)
        target = self.rules.get(_NUMBER.sub("*", stem, count=1))
        if target is None:
            return None
        module = target.module.replace("*", number.group()) if number else target.module
        return target._replace(module=f"{module}.{suffix}")

    def ignores(self, name: str) -> bool:
        """Whether `name` may be left out."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    def replace(self, rules: Mapping[str, Target]) -> "WeightMap":
        """The same map with some rules added or replaced."""
        return WeightMap({**self.rules, **rules}, self.prefix, self.ignored)


def transpose(tensor: Stored, arch: Arch) -> Stored:
    """[inputs, outputs], as GPT-2 stores it, to [outputs, inputs]; vectors stay."""
    del arch
    assert isinstance(tensor, Tensor)
    return tensor.t()
