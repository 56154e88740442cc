"""Adapters inside experts: what an adapter changes of the matrices of every expert of a layer.

Tokens with such an adapter are computed in pairs of a token and one of its experts: two products, changed,
and the activation between them. All others keep the bits that they have without adapters.
"""

import torch
from torch import Tensor

from octavo.runtime.kernels.experts import ExpertForm, Routing, Shared
from octavo.runtime.kernels.ref.experts import clamped, start
from octavo.runtime.lora.sites import Sites
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
        out = self.inner.apply(x, routing, form, shared)
        used, slots = [*self._up.table.kept, *self._down.table.kept], self._sites.slots
        if not (slots.is_active and used) or slots.is_recording:  # such steps are not replayed
            return out
        own = slots.of(len(x))
        rows = torch.isin(own, own.new_tensor(used)).nonzero().view(-1)
        if len(rows):
            chosen = Routing(routing.ids[rows], routing.weights[rows])
            if shared is not None:
                shared = Shared(shared.rows[rows], None if shared.gate is None else shared.gate[rows])
            out[rows] = self._changed(x[rows], own[rows], chosen, form, shared)
        return out

    def _changed(
        self, x: Tensor, slots: Tensor, routing: Routing, form: ExpertForm, shared: Shared | None
    ) -> Tensor:
        """Return what tokens [T, H] of these slots [T] get."""
        kernels, stacks = self._sites.kernels, self.inner.stacks()
        top_k, ids = routing.ids.shape[1], routing.ids.flatten()
        weights = routing.weights.flatten()[:, None]
        keys = torch.where(ids < 0, 0, slots.repeat_interleave(top_k) * self._up.table.experts + ids)
        rows = x.repeat_interleave(top_k, 0)
        if form.weighs_inputs:
            rows = (rows * weights).to(x.dtype)
        multiply, change = kernels.experts.multiply, kernels.adapters.add_low_rank
        groups = kernels.adapters.group(keys.int(), len(self._up.table.entries))
        inner = torch.cat([multiply(rows, ids, part) for part in (stacks.gate, stacks.up)], 1)
        change(rows, inner, groups, self._up.table, None)
        inner = inner if form.up_bias is None else inner + form.up_bias[ids.clamp(min=0)]
        inner = clamped(inner, form) if form.limit else kernels.activate(inner, form.activation, gated=True)
        inner = inner.to(x.dtype)
        made = multiply(inner, ids, stacks.down)
        change(inner, made, groups, self._down.table, None)
        made = made if form.down_bias is None else made + form.down_bias[ids.clamp(min=0)]
        made = made if form.weighs_inputs else made * weights
        made = torch.where(ids[:, None] < 0, 0.0, made).view(len(x), top_k, -1)
        total = start(x, shared).float()
        for place in range(top_k):
            total = total + made[:, place]
        return total.to(x.dtype)
