"""What kernels of recurrent layers share: where requests have their states, and how fast heads forget."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.recurrent import States


# fmt: off
@triton.jit
def owners_of(token, bounds, num_requests, STEPS: tl.constexpr):
    """Return the request of each token by bisection; the last one for tokens behind all."""
    low = tl.zeros_like(token)
    high = low + num_requests - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        is_right = tl.load(bounds + middle) <= token
        low, high = tl.where(is_right, middle, low), tl.where(is_right, high, middle - 1)
    return low


@triton.jit
def state_place(cache, tables, owner, begin, block_stride, table_stride, offset, BLOCK: tl.constexpr):
    """Return where the state stands that a request begins with at position `begin`."""
    column = tl.where(begin > 0, begin - 1, 0) // BLOCK
    block = tl.load(tables + owner * table_stride + column, mask=begin > 0, other=0)
    return cache + block.to(tl.int64) * block_stride + offset


@triton.jit
def decay_of(step, rate, bias, least, most, inside):
    """Return the logarithm of what a state is multiplied by, and the step."""
    value = tl.load(step, mask=inside, other=0.0).to(tl.float32) + tl.load(bias)
    value = tl.where(value > 20.0, value, tl.log(1.0 + tl.exp(tl.minimum(value, 20.0))))
    value = tl.minimum(tl.maximum(value, least), most)
    return tl.load(rate) * value, value


@triton.jit
def follows(slots, token, there, BLOCK: tl.constexpr):
    """Return True where a token is in the slot behind that of the one before: of single rows, a draft."""
    there = there & (token > 0)
    slot = tl.load(slots + token, mask=there, other=0)
    before = tl.load(slots + token - 1, mask=there, other=-1)
    return there & (before >= 0) & (slot == before + 1) & (slot % BLOCK != 0)


@triton.jit
def passed(state, k, v, factor, step, strength, DELTA: tl.constexpr):
    """Return the state of some rows behind a token. strength: where it stands"""
    state *= tl.exp(factor)
    if DELTA:
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        added = (v - tl.sum(state * k[None, :], 1)) * tl.sigmoid(tl.load(strength).to(tl.float32))
    else:
        added = v * step
    return state + added[:, None] * k[None, :]


@triton.jit
def log_place(kept, position, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
              DRAFTS: tl.constexpr, DELTA: tl.constexpr):
    """Return where a block has the inputs of a draft; see Scanned."""
    size: tl.constexpr = G * N + H * P + (2 * H if DELTA else H)
    return kept + H * P * N + H * P + position % (2 * DRAFTS + 1) * size


@triton.jit
def state_before(
    kept, place, inside, begin, rate, bias, least, most, head, row, n, H: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, DRAFTS: tl.constexpr, DELTA: tl.constexpr,
):
    """Return some rows of a state that have passed the drafts that came true. kept: where it was left"""
    state = tl.load(kept + place, mask=inside & (begin > 0), other=0.0)
    if DRAFTS:
        mark = tl.load(kept + H * P * N + head * P + tl.min(row, 0)).to(tl.int32)
        for position in range(tl.maximum(tl.maximum(mark, begin - DRAFTS), 0), begin):
            entry = log_place(kept, position, H, G, N, P, DRAFTS, DELTA)
            step_place = entry + G * N + H * P + head
            k = tl.load(entry + head // (H // G) * N + n, mask=n < N, other=0.0)
            v = tl.load(entry + G * N + head * P + row, mask=row < P, other=0.0)
            factor, step = decay_of(step_place, rate + head, bias + head, least, most, True)
            state = passed(state, k, v, factor, step, step_place + H, DELTA)
    return state


@triton.jit
def put_state(
    kept, slot, state, place, inside, end, head, row, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """Leave some rows of a state, which have passed `end` tokens, in a block; nothing if the slot is -1."""
    tl.store(kept + place, state, mask=inside & (slot >= 0))
    if DRAFTS:
        marks = tl.full(row.shape, 1, tl.float32) * end
        tl.store(kept + H * P * N + head * P + row, marks, mask=(row < P) & (slot >= 0))
# fmt: on


def numbers_of(states: States) -> tuple[Tensor, ...]:
    """Return the tensors of states, as kernels take them."""
    batch = states.batch
    return states.cache, states.block_tables, states.slots, batch.cu_q_lens, batch.kv_lens


def strides_of(states: States) -> tuple[int, int, int]:
    """Return the numbers that say where a state stands in its cache."""
    return states.cache.stride(0), states.block_tables.stride(0), states.offset
