"""Recurrent layers on a GPU: convolutions with a state, gates, and scans token by token.

A scan of one token per request reads and writes each state once. Requests with more tokens are scanned in
chunks (`chunked_scan`): products of small matrices are faster than one token after the other. So the bits of
a token depend on where chunks end. Nothing waits for the device, and steps can be captured.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.recurrent import Conv, Decay, Factors, GateForm, Scanned, States
from octavo.runtime.kernels.triton.chunked_scan import scan_chunks
from octavo.runtime.kernels.triton.launch import cdiv, power_of_2
from octavo.runtime.kernels.triton.states import (
    decay_of,
    follows,
    log_place,
    numbers_of,
    owners_of,
    passed,
    put_state,
    state_before,
    state_place,
    strides_of,
)

_ELEMENTS = 1024  # of one program


# fmt: off
@triton.jit
def _taken(
    x, before, state, token, channel, first, there, inside,
    begin, stride_x, stride_before, C: tl.constexpr, RING: tl.constexpr, FACTORS: tl.constexpr,
):
    """Return what the convolution takes of `token`, which may stand before the first of its request."""
    here = (there & (token >= first))[:, None] & inside
    value = tl.load(x + token[:, None] * stride_x + channel, mask=here, other=0.0).to(tl.float32)
    if FACTORS:
        place = before + token[:, None] * stride_before + channel
        value *= tl.load(place, mask=here, other=0.0).to(tl.float32)
    position = begin + token - first
    kept = (there & (position >= 0) & (token < first))[:, None] & inside
    row = position % RING
    return tl.where(kept, tl.load(state[:, None] + row[:, None] * C + channel, mask=kept, other=0.0), value)


@triton.jit
def _rows_before(slots, first, there, BLOCK: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr):
    """Return how many tokens just before `first`, that a convolution reads, are of the same request."""
    count = tl.zeros_like(first)
    if RING >= TAPS:
        for i in tl.static_range(TAPS - 1):
            there = follows(slots, first - i, there, BLOCK)
            count += there.to(count.dtype)
    return count


@triton.jit
def _conv_kernel(
    x, weight, bias, before, behind, y, cache, tables, slots, bounds, lens,
    stride_x, stride_before, stride_behind, block_stride, table_stride, offset, num_tokens, num_requests,
    C: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, BIASED: tl.constexpr, FACTORS: tl.constexpr,
    SINGLES: tl.constexpr,
):
    """Convolve some channels of some tokens. SINGLES: each is a request's only one, which gets its state."""
    token = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    owner = owners_of(token, bounds, num_requests, STEPS)
    first, end = tl.load(bounds + owner), tl.load(bounds + owner + 1)
    there = token < end
    begin = tl.load(lens + owner) - (end - first)
    before_it = _rows_before(slots, first, there, BLOCK, TAPS, RING)
    position, first, begin = begin + token - first, first - before_it, begin - before_it
    state = state_place(cache, tables, owner, begin, block_stride, table_stride, offset, BLOCK)
    inside = (token < num_tokens)[:, None] & (channel < C)
    total = tl.zeros([TILE, WIDTH], tl.float32)
    if BIASED:
        total += tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    target = cache + slot // BLOCK * block_stride + offset
    for i in tl.static_range(TAPS):
        source = token - (TAPS - 1 - i)
        value = _taken(
            x, before, state, source, channel, first, there, inside, begin, stride_x, stride_before, C, RING,
            FACTORS,
        )
        total += value * tl.load(weight + i * C + channel, mask=channel < C, other=0.0).to(tl.float32)
        if SINGLES and i > 0:
            kept = position - (TAPS - 1 - i)
            stored = inside & (there & (slot >= 0) & (kept >= 0))[:, None]
            tl.store(target[:, None] + (kept % RING)[:, None] * C + channel, value, mask=stored)
    if SILU:
        total *= tl.sigmoid(total)
    if FACTORS:
        place = behind + token[:, None] * stride_behind + channel
        total *= tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token[:, None] * C + channel, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _conv_state_kernel(
    x, before, cache, tables, slots, bounds, lens,
    stride_x, stride_before, block_stride, table_stride, offset,
    C: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Leave the last inputs of a request in each block that its tokens reach.

    The last block comes first: only the first one may be that of the state which is read.
    """
    owner = tl.program_id(0) + tl.zeros([1], tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    first, end = tl.load(bounds + owner), tl.load(bounds + owner + 1)
    begin = tl.load(lens + owner) - (end - first)
    last = tl.max(end - 1, 0).to(tl.int64)
    least, position = tl.max(first, 0), tl.max(begin, 0)
    before_it = _rows_before(slots, first, first < end, BLOCK, TAPS, RING)
    first, begin = first - before_it, begin - before_it
    state = state_place(cache, tables, owner, begin, block_stride, table_stride, offset, BLOCK)
    while last >= least:
        slot = tl.load(slots + last)
        target = cache + slot // BLOCK * block_stride + offset
        for i in tl.static_range(1, TAPS):
            source = last - (TAPS - 1 - i) + tl.zeros([1], tl.int64)
            value = _taken(
                x, before, state, source, channel, first, first < end, channel < C, begin, stride_x,
                stride_before, C, RING, FACTORS,
            )
            kept = position + last - least - (TAPS - 1 - i)
            stored = (channel < C) & (slot >= 0) & (kept >= 0)
            tl.store(target + kept % RING * C + channel, value, mask=stored)
        last -= (position + last - least) % BLOCK + 1


@triton.jit
def _scan_token(
    state, t, queries, keys, values, steps, strengths, rate, bias, skip, y, stride_q, stride_k, stride_v,
    stride_steps, stride_strengths, least, most, head, row, n, H: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, DELTA: tl.constexpr, SKIP: tl.constexpr,
):
    """Let some rows of a state pass a token, and store what it reads of them."""
    group = head // (H // G)
    q = tl.load(queries + t * stride_q + group * N + n, mask=n < N, other=0.0).to(tl.float32)
    k = tl.load(keys + t * stride_k + group * N + n, mask=n < N, other=0.0).to(tl.float32)
    v = tl.load(values + t * stride_v + head * P + row, mask=row < P, other=0.0).to(tl.float32)
    factor, step = decay_of(steps + t * stride_steps + head, rate + head, bias + head, least, most, True)
    state = passed(state, k, v, factor, step, strengths + t * stride_strengths + head, DELTA)
    if DELTA:
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * (N ** -0.5)
    seen = tl.sum(state * q[None, :], 1)
    if SKIP:
        seen += tl.load(skip + head) * v
    tl.store(y + (t * H + head) * P + row, seen.to(y.dtype.element_ty), mask=row < P)
    return state


@triton.jit
def _log_draft(
    entry, t, keys, values, steps, strengths, stride_k, stride_v, stride_steps, stride_strengths, head, row,
    n, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, DELTA: tl.constexpr,
):
    """Store the inputs of a draft; see Scanned."""
    place = head // (H // G) * N + n
    key = tl.load(keys + t * stride_k + place, mask=n < N, other=0.0).to(tl.float32)
    tl.store(entry + place, key, mask=n < N)
    place, entry = head * P + row, entry + G * N
    value = tl.load(values + t * stride_v + place, mask=row < P, other=0.0).to(tl.float32)
    tl.store(entry + place, value, mask=row < P)
    tl.store(entry + H * P + head, tl.load(steps + t * stride_steps + head).to(tl.float32))
    if DELTA:
        strength = tl.load(strengths + t * stride_strengths + head).to(tl.float32)
        tl.store(entry + H * P + H + head, strength)


@triton.jit
def _scan_kernel(
    queries, keys, values, steps, strengths, rate, bias, skip, y, cache, tables, slots, bounds, lens,
    stride_q, stride_k, stride_v, stride_steps, stride_strengths, block_stride, table_stride, offset,
    least, most, num_singles, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    N_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DRAFTS: tl.constexpr, DELTA: tl.constexpr,
    SKIP: tl.constexpr,
):
    """Let ROWS rows of the state of one head pass the only token of one request, and the drafts behind it."""
    owner, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, n = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, N_PAD)
    t, begin = tl.load(bounds + owner).to(tl.int64), tl.load(lens + owner) - 1
    place = (head * P + row)[:, None] * N + n[None, :]
    inside = (row < P)[:, None] & (n < N)[None, :]
    source = state_place(cache, tables, owner, begin, block_stride, table_stride, offset, BLOCK)
    if DRAFTS:  # noqa: SIM102  # decided while compiling
        if follows(slots, t, True, BLOCK):
            return
    state = state_before(
        source, place, inside, begin, rate, bias, least, most, head, row, n, H, G, N, P, DRAFTS, DELTA
    )
    state = _scan_token(
        state, t, queries, keys, values, steps, strengths, rate, bias, skip, y, stride_q, stride_k, stride_v,
        stride_steps, stride_strengths, least, most, head, row, n, H, G, N, P, DELTA, SKIP,
    )
    slot = tl.load(slots + t)
    kept = cache + slot // BLOCK * block_stride + offset
    put_state(kept, slot, state, place, inside, begin + 1, head, row, H, N, P, DRAFTS)
    if DRAFTS:
        draft = t + 1
        while follows(slots, draft, draft < num_singles, BLOCK):
            state = _scan_token(
                state, draft, queries, keys, values, steps, strengths, rate, bias, skip, y, stride_q,
                stride_k, stride_v, stride_steps, stride_strengths, least, most, head, row, n, H, G, N, P,
                DELTA, SKIP,
            )
            entry = log_place(kept, begin + draft - t, H, G, N, P, DRAFTS, DELTA)
            _log_draft(
                entry, draft, keys, values, steps, strengths, stride_k, stride_v, stride_steps,
                stride_strengths, head, row, n, H, G, N, P, DELTA,
            )
            draft += 1


@triton.jit
def _gate_kernel(
    x, gates, weight, y, stride_x, stride_gates, eps, num_rows,
    PARTS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    NORMED: tl.constexpr, NORM_FIRST: tl.constexpr, SIGMOID: tl.constexpr,
):
    """Gate ROWS parts: row r is part r % PARTS of token r // PARTS."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    token, part = row // PARTS, row % PARTS
    inside = (row < num_rows)[:, None] & (column < SIZE)
    place = (part * SIZE)[:, None] + column
    value = tl.load(x + (token * stride_x)[:, None] + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(gates + (token * stride_gates)[:, None] + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.sigmoid(factor) if SIGMOID else factor * tl.sigmoid(factor)
    if not NORM_FIRST:
        value *= factor
    if NORMED:
        scale = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
        learned = weight + (part % GROUPS * SIZE)[:, None] + column
        value *= scale * tl.load(learned, mask=inside, other=0.0).to(tl.float32)
    if NORM_FIRST:
        value *= factor
    tl.store(y + (row * SIZE)[:, None] + column, value.to(y.dtype.element_ty), mask=inside)
# fmt: on


def causal_conv(x: Tensor, conv: Conv, states: States, factors: Factors | None) -> Tensor:
    """See recurrent.CausalConv."""
    tokens, channels = x.shape
    y = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    weight, bias, silu = conv
    before, behind = factors or (x, x)
    requests = len(states.batch.kv_lens)
    singles = states.batch.num_singles == requests
    width = min(power_of_2(channels), 256)
    tile = max(1, min(_ELEMENTS // width, power_of_2(tokens)))
    tensors, (block_stride, table_stride, offset) = numbers_of(states), strides_of(states)
    sizes = {"C": channels, "TAPS": len(weight), "BLOCK": states.cache.shape[1], "WIDTH": width}
    sizes |= {"RING": conv.num_inputs(states.num_drafts), "FACTORS": factors is not None}
    inputs = x, weight, x if bias is None else bias, before, behind, y, *tensors
    numbers = x.stride(0), before.stride(0), behind.stride(0), block_stride, table_stride, offset
    kind = {"STEPS": (requests - 1).bit_length(), "TILE": tile, "SINGLES": singles}
    kind |= {"SILU": silu, "BIASED": bias is not None}
    grid = cdiv(tokens, tile), cdiv(channels, width)
    _conv_kernel[grid](*inputs, *numbers, tokens, requests, **sizes, **kind)
    if not singles:
        given = x, before, *tensors
        strides = x.stride(0), before.stride(0), block_stride, table_stride, offset
        _conv_state_kernel[(requests, grid[1])](*given, *strides, **sizes)
    return y


def scan(new: Scanned, decay: Decay, states: States) -> Tensor:
    """See recurrent.Scan."""
    (_, groups, key_size), (_, heads, size) = new.keys.shape, new.values.shape
    singles, requests = states.batch.num_singles, len(states.batch.kv_lens)
    make = torch.empty if singles == requests else torch.zeros  # some tokens may belong to no request
    y = make(new.values.shape, dtype=new.values.dtype, device=new.values.device)
    if not len(y):
        return y
    if singles:
        strengths = new.steps if new.strengths is None else new.strengths
        inputs = new.queries, new.keys, new.values, new.steps, strengths
        skip = decay.rate if decay.skip is None else decay.skip
        strides = [x.stride(0) for x in inputs] + [*strides_of(states)]
        rows = max(8, min(power_of_2(size), 2048 // power_of_2(key_size)))
        sizes = {"H": heads, "G": groups, "N": key_size, "P": size, "N_PAD": power_of_2(key_size)}
        kind: dict[str, Any] = {"DELTA": new.strengths is not None, "SKIP": decay.skip is not None}
        _scan_kernel[singles, heads, cdiv(size, rows)](
            *inputs, decay.rate, decay.bias, skip, y, *numbers_of(states), *strides, *decay.limits, singles,
            ROWS=rows, BLOCK=states.cache.shape[1], DRAFTS=states.num_drafts, **sizes, **kind,
        )  # fmt: skip
    if singles < requests:
        scan_chunks(new, decay, states, y)
    return y


def gate(x: Tensor, gates: Tensor, form: GateForm) -> Tensor:
    """See recurrent.Gate."""
    tokens, size = x.shape
    y = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    parts = 1 if form.weight is None else size * form.groups // len(form.weight)
    width = power_of_2(size // parts)
    rows = max(1, _ELEMENTS // width)
    weight = x if form.weight is None else form.weight
    numbers = x.stride(0), gates.stride(0), form.eps, tokens * parts
    sizes = {"PARTS": parts, "GROUPS": form.groups, "SIZE": size // parts, "WIDTH": width, "ROWS": rows}
    kind = {"NORMED": form.weight is not None, "NORM_FIRST": form.norm_first, "SIGMOID": form.sigmoid}
    _gate_kernel[(cdiv(tokens * parts, rows),)](x, gates, weight, y, *numbers, **sizes, **kind)
    return y
