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
# fmt: on


def numbers_of(states: States) -> tuple[Tensor, ...]:
    """Return the tensors of states, as kernels take them."""
    batch = states.batch
    return states.cache, states.block_tables, states.slots, batch.cu_q_lens, batch.kv_lens


def strides_of(states: States) -> tuple[int, int, int]:
    """Return the numbers that say where a state stands in its cache."""
    return states.cache.stride(0), states.block_tables.stride(0), states.offset
