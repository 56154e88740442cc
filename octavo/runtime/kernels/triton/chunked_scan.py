"""Scans of several tokens per request, in chunks: products of small matrices instead of token by token.

The state of Mamba-2 (https://arxiv.org/abs/2405.21060) meets a chunk by its decays alone. By the gated
delta rule (https://arxiv.org/abs/2412.06464) tokens of a chunk correct each other: what they add solves a
triangular system of equations, whose inverse does not depend on the state; all chunks invert theirs at once.
The idea is that of flash-linear-attention. Chunks are so many rows of the step, whatever their requests; a
program lets some rows of one head's state pass those of one request, and leaves the state where a block ends.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.recurrent import SCAN_CHUNK, Decay, Scanned, States
from octavo.runtime.kernels.triton.launch import WAVE, cdiv, has_tf32, power_of_2, reads_shared
from octavo.runtime.kernels.triton.states import (
    decay_of,
    numbers_of,
    owners_of,
    put_state,
    state_before,
    state_place,
    strides_of,
)

_LONG_CHUNK = 64  # where no system is solved; out of registers SM 8.0 spills 6 KB of a thread
_ROWS = 32  # of a state; half of it where that occupies the device, and in float32, which spilled 18 KB


# fmt: off
@triton.jit
def _unit_rows(x):
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def _inverse_kernel(
    keys, steps, strengths, rate, bias, inverse, bounds, lens,
    stride_k, stride_steps, stride_strengths, least, most, num_tokens, num_requests,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Invert 1 + what each token of a chunk takes from the earlier ones of its request and block.

    Row by row: a product of powers would be faster, but loses all digits where keys are alike.
    """
    head, i = tl.program_id(1), tl.arange(0, CHUNK)
    token = (tl.program_id(0) * CHUNK + i).to(tl.int64)
    inside = token < num_tokens
    owner = owners_of(token, bounds, num_requests, STEPS)
    end = tl.load(bounds + owner + 1)
    inside = inside & (token < end)
    block = (tl.load(lens + owner) - end + token) // BLOCK
    part = owner * (1 << 32) + block
    n = tl.arange(0, N_PAD)[None, :]
    place = keys + token[:, None] * stride_k + head // (H // G) * N + n
    k = _unit_rows(tl.load(place, mask=inside[:, None] & (n < N), other=0.0).to(tl.float32))
    place = steps + token * stride_steps + head
    decay, _ = decay_of(place, rate + head, bias + head, least, most, inside)
    decay = tl.cumsum(tl.where(inside, decay, 0.0), 0)
    strength = tl.load(strengths + token * stride_strengths + head, mask=inside, other=0.0).to(tl.float32)
    strength = tl.where(inside, tl.sigmoid(strength), 0.0)
    alike = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    # Column i: what token i takes of each earlier one.
    earlier = (i[:, None] < i[None, :]) & (part[:, None] == part[None, :]) & inside[:, None]
    gap = tl.where(earlier, decay[None, :] - decay[:, None], 0.0)
    taken = tl.where(earlier, alike * strength[None, :] * tl.exp(gap), 0.0)
    made = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, CHUNK):
        factors = tl.sum(tl.where(i[None, :] == row, taken, 0.0), 1)
        change = tl.sum(factors[:, None] * made, 0)
        made = tl.where(i[:, None] == row, made - change[None, :], made)
    tl.store(inverse + (token * H + head)[:, None] * CHUNK + i[None, :], made, mask=inside[:, None])


@triton.jit
def _chunk_kernel(
    queries, keys, values, steps, strengths, rate, bias, skip, inverse, y, cache, tables, slots, bounds, lens,
    stride_q, stride_k, stride_v, stride_steps, stride_strengths, block_stride, table_stride, offset,
    least, most, first_request, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    N_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, DRAFTS: tl.constexpr,
    DELTA: tl.constexpr, SKIP: tl.constexpr, PRECISION: tl.constexpr,
):
    """Let ROWS rows of the state of one head pass the tokens of one request."""
    owner, head = first_request + tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, n, i = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, N_PAD), tl.arange(0, CHUNK)
    group = head // (H // G)
    first, end = tl.load(bounds + owner), tl.load(bounds + owner + 1)
    token, begin = first, tl.load(lens + owner) - (end - first)
    place, inside = (head * P + p)[:, None] * N + n[None, :], (p < P)[:, None] & (n < N)[None, :]
    at = state_place(cache, tables, owner, begin, block_stride, table_stride, offset, BLOCK)
    state = state_before(
        at, place, inside, begin, rate, bias, least, most, head, p, n, H, G, N, P, DRAFTS, DELTA
    )
    while token < end:
        chunk = token // CHUNK * CHUNK
        border = token + BLOCK - (begin + token - first) % BLOCK
        stop = tl.minimum(tl.minimum(end, chunk + CHUNK), border)
        t = (chunk + i).to(tl.int64)
        here = (t >= token) & (t < stop)
        of_keys, of_values = here[:, None] & (n < N)[None, :], here[:, None] & (p < P)[None, :]
        q_place = queries + t[:, None] * stride_q + group * N + n[None, :]
        k_place = keys + t[:, None] * stride_k + group * N + n[None, :]
        q = tl.load(q_place, mask=of_keys, other=0.0).to(tl.float32)
        k = tl.load(k_place, mask=of_keys, other=0.0).to(tl.float32)
        v_place = values + t[:, None] * stride_v + head * P + p[None, :]
        v = tl.load(v_place, mask=of_values, other=0.0).to(tl.float32)
        decay, step = decay_of(steps + t * stride_steps + head, rate + head, bias + head, least, most, here)
        decay = tl.where(here, decay, 0.0)
        total, decay = tl.sum(decay, 0), tl.cumsum(decay, 0)
        since = tl.exp(decay)[:, None]
        if DELTA:
            q, k = _unit_rows(q) * (N ** -0.5), _unit_rows(k)
            strength = tl.load(strengths + t * stride_strengths + head, mask=here, other=0.0).to(tl.float32)
            known = tl.dot(k, tl.trans(state), input_precision=PRECISION) * since
            missing = (v - known) * tl.where(here, tl.sigmoid(strength), 0.0)[:, None]
            place_of = inverse + (t * H + head)[:, None] * CHUNK + i[None, :]
            solved = tl.load(place_of, mask=here[:, None] & here[None, :], other=0.0)
            added = tl.dot(solved, missing, input_precision=PRECISION)
        else:
            added = v * tl.where(here, step, 0.0)[:, None]
        seen = tl.dot(q, tl.trans(state), input_precision=PRECISION) * since
        gap = tl.where(i[:, None] >= i[None, :], decay[:, None] - decay[None, :], 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * tl.exp(gap)
        scores = tl.where(i[:, None] >= i[None, :], scores, 0.0)
        seen += tl.dot(scores, added, input_precision=PRECISION)
        if SKIP:
            seen += tl.load(skip + head) * v
        tl.store(y + (t[:, None] * H + head) * P + p[None, :], seen.to(y.dtype.element_ty), mask=of_values)
        added *= tl.exp(total - decay)[:, None]
        state = state * tl.exp(total) + tl.dot(tl.trans(added), k, input_precision=PRECISION)
        if (stop == end) | (stop == border):
            slot = tl.load(slots + stop - 1)
            kept = cache + slot // BLOCK * block_stride + offset
            put_state(kept, slot, state, place, inside, begin + stop - first, head, p, H, N, P, DRAFTS)
        token = stop
# fmt: on


def scan_chunks(new: Scanned, decay: Decay, states: States, y: Tensor) -> None:
    """Fill y for the requests behind the singles. See recurrent.Scan."""
    (tokens, heads, size), (_, groups, key_size), batch = y.shape, new.keys.shape, states.batch
    requests = len(batch.kv_lens)
    bounds, lens = batch.cu_q_lens, batch.kv_lens
    is_rounded = y.dtype != torch.float32 and has_tf32()  # else products are made in registers
    is_long = is_rounded and new.strengths is None and reads_shared()
    common: dict[str, Any] = {
        "H": heads,
        "G": groups,
        "N": key_size,
        "N_PAD": power_of_2(key_size),
        "BLOCK": states.cache.shape[1],
        "CHUNK": _LONG_CHUNK if is_long else SCAN_CHUNK,
        "PRECISION": "tf32" if is_rounded else "ieee",
    }
    strengths, inverse = (new.steps, decay.rate) if new.strengths is None else (new.strengths, None)
    if inverse is None:
        inverse = torch.empty((tokens, heads, SCAN_CHUNK), dtype=torch.float32, device=y.device)
        given = new.keys, new.steps, strengths, decay.rate, decay.bias, inverse, bounds, lens
        strides = (x.stride(0) for x in given[:3])
        sizes = common | {"STEPS": (requests - 1).bit_length()}
        grid = cdiv(tokens, SCAN_CHUNK), heads
        _inverse_kernel[grid](*given, *strides, *decay.limits, tokens, requests, **sizes)
    inputs = new.queries, new.keys, new.values, new.steps, strengths
    skip = decay.rate if decay.skip is None else decay.skip
    strides_in = [x.stride(0) for x in inputs] + [*strides_of(states)]
    number = (requests - batch.num_singles) * heads
    is_tall = is_rounded and number * cdiv(size, _ROWS) >= WAVE
    rows = max(16, min(_ROWS if is_tall else _ROWS // 2, power_of_2(size)))
    kind = {"P": size, "DELTA": new.strengths is not None, "SKIP": decay.skip is not None}
    kind |= {"ROWS": rows, "DRAFTS": states.num_drafts}
    _chunk_kernel[requests - batch.num_singles, heads, cdiv(size, rows)](
        *inputs, decay.rate, decay.bias, skip, inverse, y, *numbers_of(states), *strides_in, *decay.limits,
        batch.num_singles, **common, **kind,
    )  # fmt: skip
