"""Experts that adapters change, in Triton.

Tokens whose adapters change experts take part with none in the products of all others, whose bits stay. For
them there are products that are not activated and not weighed, changed by the kernels of adapters, to which a
pair's slot is slot * E + expert. All of it has the shape of the step and nothing waits for the device: so
captured steps serve whatever adapters come later.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.adapters import ENTRY
from octavo.runtime.kernels.experts import Changes, ExpertForm, Routing, Shared, Stacks
from octavo.runtime.kernels.triton import experts
from octavo.runtime.kernels.triton.experts import Matrices, add_up, kind_of, multiply, tiles_of
from octavo.runtime.kernels.triton.launch import cdiv, overlapped, power_of_2, release, wait
from octavo.runtime.kernels.triton.rounded_experts import activated

_WIDTH = 1024
_CHANGED_AT_ONCE = 1 << 13  # pairs, which bounds the memory of what they make


# fmt: off
@triton.jit
def _gates_kernel(
    both, ids, out, SIZE, WIDTH: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Activate gates and values of a pair, which stand side by side."""
    wait(PDL)
    release(PDL)
    pair, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    source, mask = both + pair * 2 * SIZE + column, (column < SIZE) & (tl.load(ids + pair) >= 0)
    gate = tl.load(source, mask=mask, other=0.0)
    value = tl.load(source + SIZE, mask=mask, other=0.0)
    made = activated(gate, value, KIND, LIMIT, ALPHA)
    tl.store(out + pair * SIZE + column, made.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_pairs"])
def _divide_kernel(
    ids, slots, ups, downs, weights, divided, factors, num_pairs,
    E: tl.constexpr, TOP_K: tl.constexpr, ENTRY: tl.constexpr, WEIGHS: tl.constexpr, WIDTH: tl.constexpr,
):
    """Write the experts of pairs without changes, of those with them, and their keys; -1, -1 and 0 = none.

    factors: what the outputs of changed pairs are yet to be multiplied by
    """
    pair = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = pair < num_pairs
    expert = tl.load(ids + pair, mask=inside, other=-1)
    first = tl.load(slots + pair // TOP_K, mask=inside, other=0) * E
    entry = first.to(tl.int64) * ENTRY
    changes = tl.load(ups + entry, mask=inside, other=0) | tl.load(downs + entry, mask=inside, other=0)
    there = (changes != 0) & (expert >= 0) & (expert < E)
    tl.store(divided + pair, tl.where(there, -1, expert), mask=inside)
    tl.store(divided + num_pairs + pair, tl.where(there, expert, -1), mask=inside)
    tl.store(divided + 2 * num_pairs + pair, tl.where(there, first + expert, 0), mask=inside)
    factor = tl.full([WIDTH], 1.0, tl.float32)
    if not WEIGHS:
        factor = tl.where(there, tl.load(weights + pair, mask=inside, other=0.0), factor)
    tl.store(factors + pair, factor, mask=inside)
# fmt: on


def block_experts(
    x: Tensor, routing: Routing, stacks: Stacks, form: ExpertForm, shared: Shared | None
) -> Tensor:
    """See experts.BlockExperts."""
    if (changes := form.changes) is None or not len(x):
        return experts.block_experts(x, routing, stacks, form, shared)
    up, down = experts.packed(stacks)
    (ids, weights), size = routing, down.first.shape[1]
    divided, factors = _divide(routing, changes, form)
    made = experts.multiply_all(x, Routing(divided[0], weights), up, down, form)
    step = max(1, _CHANGED_AT_ONCE // ids.shape[1])
    for part in (slice(first, first + step) for first in range(0, len(x), step)):
        chosen, target = Routing(divided[1, part], weights[part]), made.view(*ids.shape, size)[part]
        _multiply_changed(x[part], chosen, divided[2, part], up, down, form, target.flatten(0, 1))
    made *= factors
    return add_up(made, ids, shared, x.new_empty((len(x), size)))


def _divide(routing: Routing, changes: Changes, form: ExpertForm) -> tuple[Tensor, Tensor]:
    """Return what `_divide_kernel` writes: [3, T, k] and [T * k, 1]."""
    ids, count = routing.ids, changes.up.experts
    divided, factors = ids.new_empty((3, *ids.shape)), routing.weights.new_empty((ids.numel(), 1))
    given = changes.slots, changes.up.entries, changes.down.entries, routing.weights, divided, factors
    how = {"TOP_K": ids.shape[1], "WEIGHS": form.weighs_inputs, "WIDTH": _WIDTH}
    _divide_kernel[(cdiv(ids.numel(), _WIDTH),)](ids, *given, ids.numel(), E=count, ENTRY=ENTRY, **how)
    return divided, factors


def _multiply_changed(
    x: Tensor, routing: Routing, keys: Tensor, up: Matrices, down: Matrices, form: ExpertForm, made: Tensor
) -> None:
    """Compute pairs with what adapters change, not weighed, into their rows of `made`."""
    (ids, weights), inner, changes = routing, up.first.shape[1], form.changes
    assert changes is not None
    group, change = changes.kernels.group, changes.kernels.add_low_rank
    rows = x[:, None].expand(-1, ids.shape[1], -1).flatten(0, 1)
    if form.weighs_inputs:
        rows = (rows * weights.view(-1, 1)).to(x.dtype)
    groups, tiles = group(keys.flatten(), len(changes.up.entries)), tiles_of(x, ids, up)
    both = made.new_empty((len(made), 2 * inner), dtype=torch.float32)
    between = x.new_empty((len(made), inner))
    multiply(x, routing, tiles, up, form.up_bias, both, UP=True, APART=True, **kind_of(form))
    change(rows, both, groups, changes.up, None)
    width, how = min(power_of_2(inner), _WIDTH), kind_of(form) | {"WEIGHS": True}
    grid, gates = (len(made), cdiv(inner, width)), {name: how[name] for name in ("KIND", "LIMIT", "ALPHA")}
    _gates_kernel[grid](both, ids, between, inner, WIDTH=width, **gates, **overlapped())
    multiply(between, routing, tiles, down, form.down_bias, made, UP=False, **how)
    change(between, made, groups, changes.down, None)
