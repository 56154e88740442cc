"""References of the kernels of recurrent layers: one token after the other."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.recurrent import Conv, Decay, Factors, GateForm, RecurrentKernels, Scanned, States


def causal_conv(x: Tensor, conv: Conv, states: States, factors: Factors | None) -> Tensor:
    """See recurrent.CausalConv."""
    before, size = len(conv.weight) - 1, conv.num_inputs(states.num_drafts)
    inputs = x.float() if factors is None else x.float() * factors[0].float()
    out = torch.zeros_like(inputs)
    seen = inputs[:0]
    for piece in _pieces(states):
        if piece.source is not None:
            places = torch.arange(piece.position - before, piece.position, device=x.device)
            ring = piece.source[: size * x.shape[1]].view(size, -1)
            seen = torch.where(places[:, None] < 0, 0.0, ring[places % size])
        seen = torch.cat([seen, inputs[piece.tokens]])
        total = torch.zeros_like(inputs[piece.tokens]) if conv.bias is None else conv.bias.float()
        for place, weight in enumerate(conv.weight.float()):
            total = total + weight * seen[place : len(seen) - before + place]
        out[piece.tokens] = functional.silu(total) if conv.silu else total
        if piece.target is not None:
            places = piece.position - before + torch.arange(len(seen), device=x.device)
            kept = (places >= max(0, piece.position + piece.num_known - before)).nonzero()[:, 0]
            piece.target[: size * x.shape[1]].view(size, -1)[places[kept] % size] = seen[kept]
        seen = seen[piece.num_known : piece.num_known + before]
    return (out if factors is None else out * factors[1].float()).to(x.dtype)


def scan(new: Scanned, decay: Decay, states: States) -> Tensor:
    """See recurrent.Scan."""
    (_, heads, rows), (_, groups, size) = new.values.shape, new.keys.shape
    parts = [new.keys.flatten(1), new.values.flatten(1), new.steps]
    parts += [] if new.strengths is None else [new.strengths]
    inputs = torch.cat([part.float() for part in parts], 1)
    queries = new.queries.float().repeat_interleave(heads // groups, 1)
    queries = queries if new.strengths is None else _unit(queries) * size**-0.5
    bounds = (numbers := heads * rows * size) + heads * rows

    def meet(state: Tensor, given: Tensor) -> Tensor:
        keys, values, steps, *strengths = torch.split(given, [part.shape[1] for part in parts])
        keys, values = keys.view(groups, size).repeat_interleave(heads // groups, 0), values.view(heads, rows)
        steps = functional.softplus(steps + decay.bias).clamp(*decay.limits)[:, None]
        state, added = state * (decay.rate[:, None] * steps).exp()[..., None], values * steps
        for strength in strengths:
            keys = _unit(keys)
            missing = values - (state @ keys[..., None])[..., 0]
            added = missing * strength.sigmoid()[:, None]
        behind: Tensor = state + added[..., None] * keys[:, None]
        return behind

    out = torch.zeros_like(new.values, dtype=torch.float32)
    state = out.new_zeros(heads, rows, size)
    for tokens, num_known, position, source, target in _pieces(states):
        before, behind = (x if x is None else x[bounds:].view(-1, inputs.shape[1]) for x in (source, target))
        if source is not None and before is not None:
            state = (source[:numbers] if position else torch.zeros_like(source[:numbers])).view(state.shape)
            passed = int(source[numbers]) if states.num_drafts else position
            for place in range(max(passed, position - states.num_drafts, 0), position):
                state = meet(state, before[place % states.num_logged])
        for place, t in enumerate(range(len(out))[tokens], 1):
            state = meet(state, inputs[t])
            out[t] = (state @ queries[t, ..., None])[..., 0]
            if target is not None and place == num_known:
                target[:numbers] = state.flatten()
                if states.num_drafts:
                    target[numbers:bounds] = position + num_known
            elif behind is not None and place > num_known:
                behind[(position + place - 1) % states.num_logged] = inputs[t]
    return (out if decay.skip is None else out + decay.skip[:, None] * new.values.float()).to(
        new.values.dtype
    )


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


class _Piece(NamedTuple):
    """Tokens of a request within a block, `num_known`, and drafts behind them.

    position: of the first; source: numbers of the block that has the state before, None where it is known
    target:   numbers of the block where the state goes; None = nowhere
    """

    tokens: slice
    num_known: int
    position: int
    source: Tensor | None
    target: Tensor | None


def _pieces(states: States) -> Iterator[_Piece]:
    cache, offset, tables, slots, batch, num_drafts = states
    size, kept, places = cache.shape[1], cache[:, 0, offset:], slots.tolist()
    starts, ends = batch.cu_q_lens.tolist(), batch.kv_lens.tolist()

    def follows(request: int) -> bool:
        if not num_drafts or not 0 < request < len(ends) or starts[request + 1] != starts[request] + 1:
            return False
        before, slot = places[starts[request] - 1 : starts[request] + 1]
        return bool(before >= 0 and slot == before + 1 and slot % size)

    for request, end in enumerate(ends):
        first, position = starts[request], end - (starts[request + 1] - starts[request])
        source: Tensor | None = kept[int(tables[request, max(position - 1, 0) // size])]
        while 0 <= position < end and not follows(request):
            stop = min(end, (position // size + 1) * size)
            last = first + stop - position
            behind = 0
            while stop == end and follows(request + 1 + behind):
                behind += 1
            target = kept[places[last - 1] // size] if places[last - 1] >= 0 else None
            yield _Piece(slice(first, last + behind), last - first, position, source, target)
            first, position, source = last, stop, None


REFERENCES = RecurrentKernels(causal_conv, scan, gate)
