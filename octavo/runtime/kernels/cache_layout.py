"""`CacheLayout`: how what a layer keeps lies in the bytes of blocks. Asked by whoever allocates a cache.

Of heads it is [num_blocks, 2, block_size, num_kv_heads, head_dim], keys before values, in a float type.
A latent cache is the same with one vector for key and value: [num_blocks, 1, block_size, 1, components].
In int8 every key and value is rounded to 127 steps of a scale of its own, and the last axis is head_dim + 4:
room for the scales. Half a block is then block_size * num_kv_heads vectors of head_dim bytes, and behind them
the scales in float32, [num_kv_heads, block_size], where those of neighbours are loaded together.
States are [num_blocks, block_size, numbers] in float32, where all slots of a block are the same memory.
A block stays one piece of bytes, so who copies, moves or stores it needs to know its size only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.base.errors import Unsupported
from octavo.messages.kv import HeadsKV, KVCacheSpec, LatentKV, StateKV

SCALE_BYTES = 4
LARGEST = 127
"""Of a rounded key or value; -128 does not occur."""
_SMALLEST = 1e-30
"""A vector without a component as large as this is stored as zeros."""


def make_spec(num_kv_heads: int, head_dim: int, dtype: torch.dtype, sliding_window: int = 0) -> KVCacheSpec:
    """Return what an attention layer keeps per token in this type. Raises Unsupported for a wrong size."""
    if dtype == torch.int8 and head_dim % SCALE_BYTES:
        raise Unsupported(
            f"A KV cache in int8 takes heads by fours; this model has heads of {head_dim}. Leave out "
            "kv_cache_dtype, or use bfloat16 or float16."
        )
    size = num_kv_heads * _width(head_dim, dtype) * dtype.itemsize
    return HeadsKV(num_kv_heads, head_dim, str(dtype).removeprefix("torch."), 2 * size, sliding_window)


def make_latent_spec(size: int, dtype: torch.dtype) -> KVCacheSpec:
    """Return what a latent attention layer keeps per token in this type. Raises Unsupported for int8."""
    if dtype == torch.int8:
        raise Unsupported("A latent KV cache cannot be int8: leave out kv_cache_dtype.")
    return LatentKV(size, str(dtype).removeprefix("torch."), size * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The layout of a layer's cache with a number of slots per block."""

    spec: KVCacheSpec
    block_size: int

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the cache's elements."""
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return dtype

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block."""
        spec = self.spec
        return spec.num_bytes if isinstance(spec, StateKV) else self.block_size * spec.bytes_per_token

    def view(self, raw: Tensor) -> Tensor:
        """Return the cache that lies in `raw`, [num_blocks, block_bytes] uint8: the same memory."""
        if isinstance(self.spec, StateKV):
            states = raw.view(torch.float32)[:, None, : self.spec.num_bytes // 4]
            return states.expand(-1, self.block_size, -1)
        heads, width = self.spec.num_kv_heads, _width(self.spec.head_dim, self.dtype)
        return raw.view(self.dtype).view(len(raw), self.spec.halves, self.block_size, heads, width)

    def zeros(self, num_blocks: int, device: torch.device) -> Tensor:
        """Return a new cache for one layer."""
        return self.view(torch.zeros((num_blocks, self.block_bytes), dtype=torch.uint8, device=device))

    def all_finite(self, raw: Tensor) -> bool:
        """Return True if blocks, [num_blocks, block_bytes] uint8, hold neither NaN nor infinity."""
        cache = self.view(raw)
        floats = rounded_parts(cache)[1] if cache.dtype == torch.int8 else cache.float()
        return bool(floats.isfinite().all())


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what int8 keeps of vectors [..., head_dim]: int8 of that shape, and scales [...] in float32.

    Where a component is NaN or infinite, the scale is NaN and all components are 0.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    finite, counts = largest.isfinite(), largest >= _SMALLEST
    values = torch.where(finite & counts, x * (LARGEST / largest), 0.0).round().to(torch.int8)
    scales = torch.where(finite, torch.where(counts, largest / LARGEST, 0.0), float("nan"))
    return values, scales.squeeze(-1)


def rounded_parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a cache in int8, or of some blocks [..., 2, block_size, num_kv_heads, head_dim + 4].

    Returns values [..., 2, block_size, num_kv_heads, head_dim], scales [..., 2, block_size, num_kv_heads].
    """
    *outer, block_size, heads, width = cache.shape
    head_dim = width - SCALE_BYTES
    halves = cache.view(*outer, -1)
    size = block_size * heads * head_dim
    values = halves[..., :size].view(*outer, block_size, heads, head_dim)
    scales = halves[..., size:].view(torch.float32).view(*outer, heads, block_size)
    return values, scales.transpose(-1, -2)


def _width(head_dim: int, dtype: torch.dtype) -> int:
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim
