"""References of the experts' kernels: a loop over experts, in ascending order."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.experts import Changes, ExpertForm, Router, Routing, Shared, Stacks
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.blocks import block_matmul
from octavo.runtime.kernels.ref.elementwise import activate

Product = Callable[[Tensor, int], Tensor]
"""Multiplies rows by the matrix of an expert."""


def route(logits: Tensor, bias: Tensor | None, router: Router, ids: Tensor | None = None) -> Routing:
    """See experts.Route."""
    logits = logits.float()
    finite = logits.isfinite().all(-1, keepdim=True)
    logits = torch.where(finite, logits, 0.0)
    scores = logits.softmax(-1) if router.scores == "softmax" else logits
    scores = scores.sigmoid() if router.scores == "sigmoid" else scores
    choice = _open(scores if bias is None else scores + bias, router)
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, : router.top_k]
    weights = scores.gather(1, chosen)
    if router.scores == "logits":
        weights = weights.softmax(-1)
    if router.normalises:
        weights = weights / (weights.sum(-1, keepdim=True) + router.epsilon)
    kept = chosen.int() if ids is None else ids.copy_(chosen)
    return Routing(kept, torch.where(finite, weights * router.factor, torch.nan))


def _open(choice: Tensor, router: Router) -> Tensor:
    """Return [T, E] with minus infinity for experts of closed groups."""
    if router.num_groups == 1:
        return choice
    groups = choice.view(len(choice), router.num_groups, choice.shape[1] // router.num_groups)
    values = groups.topk(router.best_of_group).values.sum(-1)
    best = values.sort(dim=-1, descending=True, stable=True).indices[:, : router.top_groups]
    closed = torch.ones_like(values, dtype=torch.bool).scatter(1, best, False)
    return groups.masked_fill(closed[..., None], -torch.inf).flatten(1)


def dense_experts(
    x: Tensor, routing: Routing, up: Tensor, down: Tensor, form: ExpertForm, shared: Shared | None
) -> Tensor:
    """See experts.DenseExperts."""
    return _sum_up(
        x,
        routing,
        (lambda rows, e: functional.linear(rows, up[e]), lambda rows, e: functional.linear(rows, down[e])),
        form,
        shared,
    )


def block_experts(
    x: Tensor, routing: Routing, stacks: Stacks, form: ExpertForm, shared: Shared | None
) -> Tensor:
    """See experts.BlockExperts."""

    def multiply(rows: Tensor, matrix: Packed, expert: int) -> Tensor:
        scales = None if matrix.scales is None else matrix.scales[expert]
        return block_matmul(rows, matrix._replace(blocks=matrix.blocks[expert], scales=scales))

    def both(rows: Tensor, expert: int) -> Tensor:
        return torch.cat([multiply(rows, stacks.gate, expert), multiply(rows, stacks.up, expert)], 1)

    return _sum_up(x, routing, (both, lambda rows, e: multiply(rows, stacks.down, e)), form, shared)


def _sum_up(
    x: Tensor, routing: Routing, products: tuple[Product, Product], form: ExpertForm, shared: Shared | None
) -> Tensor:
    total = start(x, shared).float()
    for expert in sorted({*routing.ids.flatten().tolist()} - {-1}):
        tokens, places = torch.where(routing.ids == expert)
        weights = routing.weights[tokens, places, None]
        rows = (x[tokens] * weights).to(x.dtype) if form.weighs_inputs else x[tokens]
        inner = _add(products[0](rows, expert), form.up_bias, expert)
        _change(rows, inner, tokens, expert, form.changes, is_up=True)
        inner = clamped(inner, form) if form.limit else activate(inner, form.activation, gated=True)
        made = _add(products[1](inner, expert), form.down_bias, expert).float()
        _change(inner, made, tokens, expert, form.changes, is_up=False)
        total[tokens] += made if form.weighs_inputs else made * weights
    return total.to(x.dtype)


def _change(
    x: Tensor, out: Tensor, tokens: Tensor, expert: int, changes: Changes | None, *, is_up: bool
) -> None:
    """Add what adapters change of one expert's product."""
    if changes is not None:
        table = changes.up if is_up else changes.down
        keys = changes.slots[tokens] * table.experts + expert
        changes.kernels.add_low_rank(x, out, keys, table, None)


def clamped(inner: Tensor, form: ExpertForm) -> Tensor:
    """Return gpt-oss's activation."""
    gate, value = inner.chunk(2, -1)
    gate, value = gate.clamp(max=form.limit), value.clamp(-form.limit, form.limit)
    return gate * (form.alpha * gate).sigmoid() * (value + 1)


def start(x: Tensor, shared: Shared | None) -> Tensor:
    """Return what the experts of x are added to: [T, H], a new tensor."""
    if shared is None:
        return torch.zeros_like(x)
    return shared.rows.clone() if shared.gate is None else shared.rows * shared.gate.sigmoid()


def _add(rows: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return rows if bias is None else rows + bias[expert]
