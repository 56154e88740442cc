"""How keys and values lie in a cache tensor. Asked by whoever allocates one, and by the torch twins.

A cache is [num_blocks, 2, block_size, num_kv_heads, head_dim], keys before values, in a floating-point type.
In int8 every key and value is rounded to 127 steps of a scale of its own, and the last axis is head_dim + 4:
room for the scales. Half a block is then block_size * num_kv_heads vectors of head_dim bytes, and behind them
the scales in float32, [num_kv_heads, block_size], where those of neighbours are loaded together.
A block stays one piece of bytes, so who copies, moves or stores it needs to know its size only.
"""

import torch
from torch import Tensor

from octavo.base.errors import Unsupported
from octavo.messages.kv import KVCacheSpec

SCALE_BYTES = 4
LARGEST = 127
"""Of a rounded key or value; -128 does not occur."""
_SMALLEST = 1e-30
"""A vector without a component as large as this is stored as zeros."""


def make_spec(num_kv_heads: int, head_dim: int, dtype: torch.dtype, sliding_window: int = 0) -> KVCacheSpec:
    """What an attention layer keeps per token in this type. Raises Unsupported for a size it cannot have."""
    if dtype == torch.int8 and head_dim % SCALE_BYTES:
        raise Unsupported(
            f"A KV cache in int8 takes heads by fours; this model has heads of {head_dim}. Leave out "
            "kv_cache_dtype, or use bfloat16 or float16."
        )
    size = num_kv_heads * _width(head_dim, dtype) * dtype.itemsize
    return KVCacheSpec(num_kv_heads, head_dim, 2 * size, sliding_window)


def cache_shape(spec: KVCacheSpec, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Of one layer's cache."""
    return (num_blocks, 2, block_size, spec.num_kv_heads, _width(spec.head_dim, dtype))


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """What int8 keeps of vectors [..., head_dim]: int8 of that shape, and scales [...] in float32.

    Where a component is no number or infinite, the scale is not a number and all components are 0.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    finite, counts = largest.isfinite(), largest >= _SMALLEST
    values = torch.where(finite & counts, x * (LARGEST / largest), 0.0).round().to(torch.int8)
    scales = torch.where(finite, torch.where(counts, largest / LARGEST, 0.0), float("nan"))
    return values, scales.squeeze(-1)


def rounded_parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a cache in int8, or of some of its blocks [..., 2, block_size, num_kv_heads, head_dim + 4].

    Returns values [..., 2, block_size, num_kv_heads, head_dim], scales [..., 2, block_size, num_kv_heads].
    """
    *outer, block_size, heads, width = cache.shape
    head_dim = width - SCALE_BYTES
    halves = cache.view(*outer, -1)
    size = block_size * heads * head_dim
    values = halves[..., :size].view(*outer, block_size, heads, head_dim)
    scales = halves[..., size:].view(torch.float32).view(*outer, heads, block_size)
    return values, scales.transpose(-1, -2)


def all_finite(content: Tensor) -> bool:
    """Whether blocks [..., 2, block_size, num_kv_heads, width] hold numbers only."""
    floats = rounded_parts(content)[1] if content.dtype == torch.int8 else content.float()
    return bool(floats.isfinite().all())


def _width(head_dim: int, dtype: torch.dtype) -> int:
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim
