"""References of the kernels of recurrent layers: one token after the other."""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.recurrent import Conv, Decay, Factors, GateForm, RecurrentKernels, Scanned, States


def causal_conv(x: Tensor, conv: Conv, states: States, factors: Factors | None) -> Tensor:
    """See recurrent.CausalConv."""
    before = len(conv.weight) - 1
    inputs = x.float() if factors is None else x.float() * factors[0].float()
    out = torch.zeros_like(inputs)
    for tokens, state in _pieces(states, (before, x.shape[1])):
        seen = torch.cat([state, inputs[tokens]])
        total = torch.zeros_like(inputs[tokens]) if conv.bias is None else conv.bias.float()
        for place, weight in enumerate(conv.weight.float()):
            total = total + weight * seen[place : len(seen) - before + place]
        out[tokens] = functional.silu(total) if conv.silu else total
        state.copy_(seen[-before:])
    return (out if factors is None else out * factors[1].float()).to(x.dtype)


def scan(new: Scanned, decay: Decay, states: States) -> Tensor:
    """See recurrent.Scan."""
    values, heads = new.values.float(), new.values.shape[1]
    queries, keys = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (new.queries, new.keys))
    if new.strengths is not None:
        queries, keys = _unit(queries) * queries.shape[2] ** -0.5, _unit(keys)
    steps = functional.softplus(new.steps.float() + decay.bias).clamp(*decay.limits)[..., None]
    factors = (decay.rate[:, None] * steps).exp()[..., None]
    out = torch.zeros_like(values)
    for tokens, state in _pieces(states, (*values.shape[1:], keys.shape[2])):
        for t in range(len(values))[tokens]:
            state.mul_(factors[t])
            added = values[t] * steps[t]
            if new.strengths is not None:
                missing = values[t] - (state @ keys[t, :, :, None])[..., 0]
                added = missing * new.strengths[t].float().sigmoid()[:, None]
            state.add_(added[..., None] * keys[t, :, None])
            out[t] = (state @ queries[t, :, :, None])[..., 0]
    return (out if decay.skip is None else out + decay.skip[:, None] * values).to(new.values.dtype)


def gate(x: Tensor, gates: Tensor, form: GateForm) -> Tensor:
    """See recurrent.Gate."""
    factors = gates.float().sigmoid() if form.sigmoid else functional.silu(gates.float())
    product = x.float() if form.norm_first else x.float() * factors
    if form.weight is not None:
        weight = form.weight.float().view(form.groups, -1)
        parts = product.view(len(x), -1, *weight.shape)
        product = (parts * (parts.square().mean(-1, keepdim=True) + form.eps).rsqrt() * weight).flatten(1)
    return (product * factors if form.norm_first else product).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _pieces(states: States, shape: tuple[int, ...]) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tokens of each request within each block, and the state, to be changed in place."""
    cache, offset, tables, slots, batch = states
    size, kept = cache.shape[1], cache[:, 0, offset : offset + prod(shape)]
    starts, ends = batch.cu_q_lens.tolist(), batch.kv_lens.tolist()
    for request, end in enumerate(ends):
        first, position = starts[request], end - (starts[request + 1] - starts[request])
        block = int(tables[request, max(position - 1, 0) // size])
        state = kept[block].clone().view(shape) if position > 0 else kept.new_zeros(shape)
        while 0 <= position < end:
            stop = min(end, (position // size + 1) * size)
            last = first + stop - position
            yield slice(first, last), state
            if slots[last - 1] >= 0:
                kept[slots[last - 1] // size] = state.flatten()
            first, position = last, stop


REFERENCES = RecurrentKernels(causal_conv, scan, gate)
