"""Adapters inside experts: what an adapter changes of the matrices of every expert of a layer.

The kernel of experts changes both products of the tokens with such an adapter. All others keep the bits that
they have without adapters.
"""

import torch
from torch import Tensor

from octavo.runtime.kernels.experts import Changes, ExpertForm, Routing, Shared
from octavo.runtime.lora.sites import Reach, Sites
from octavo.runtime.quantization.method import ExpertsMethod
from octavo.runtime.quantization.parameter import Layout, Parameter


class AdaptedExperts(ExpertsMethod):
    """Computes experts and changes what the tokens with adapters get of them."""

    def __init__(self, inner: ExpertsMethod, sites: Sites, name: str, device: torch.device) -> None:
        self.inner, self._sites, self._name, self._device = inner, sites, name, device

    def create(self, up: Layout, down: Layout) -> dict[str, Parameter]:
        size, count = up.shards[0].size, len(down.shards)
        ends = (0, size, 2 * size), (0, down.others[-1])
        self._up, self._down = (
            self._sites.add(f"{self._name}.{end}", layout, None, self._device, bounds, count)
            for end, layout, bounds in zip(("up", "down"), (up, down), ends, strict=True)
        )
        self.inner.num_spare = self.num_spare
        return self.inner.create(up, down)

    def after_load(self) -> None:
        self.inner.after_load()

    def slots(self) -> list[Tensor]:
        return self.inner.slots()

    def describe(self) -> list[str]:
        return self.inner.describe()

    def apply(self, x: Tensor, routing: Routing, form: ExpertForm, shared: Shared | None = None) -> Tensor:
        slots, kernels = self._sites.slots, self._sites.kernels
        if slots.reach < Reach.EXPERTS or not self._sites.can_change_experts:
            return self.inner.apply(x, routing, form, shared)
        changes = Changes(slots.of(len(x)), self._up.table, self._down.table, kernels.adapters)
        form = form._replace(changes=changes)
        return kernels.experts.block_experts(x, routing, self.inner.stacks(), form, shared)
