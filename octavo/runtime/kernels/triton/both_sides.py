"""Attention to both sides, as encoders and the tokens of an image have it, by torch's fused kernels.

Whole requests in 16 bits are one call over packed tokens. Else sequences of equal lengths are one call: keys
and values are gathered from the paged cache for it. The lengths are read from the device by the first layer,
which waits for them; none of these steps is captured.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.attention import HeadInputs, Ragged, Scores
from octavo.runtime.kernels.ref.cache import paged_attention as reference
from octavo.runtime.kernels.triton.launch import has_matrix_units
from octavo.runtime.kernels.triton.store import store_kv

_LARGEST_HEAD = 256

_MOST_KEYS = 1 << 20
"""Gathered at once."""


def attend_to_both_sides(
    q: Tensor, cache: Tensor, block_tables: Tensor, batch: Ragged, scores: Scores
) -> Tensor:
    """See attention.PagedAttention, where queries see later positions, too."""
    if scores.soft_cap or scores.sinks is not None or cache.dtype != q.dtype:
        return reference(q, cache, block_tables, batch, scores)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts = batch.cu_q_lens.long()
    if batch.alike is None:
        batch.alike = list(_alike(starts.diff().tolist(), batch.kv_lens.tolist(), q.device))
    for num_new, num_keys, requests in batch.alike:
        for some in requests.split(max(1, _MOST_KEYS // max(num_keys, 1))):
            rows = starts[some, None] + torch.arange(num_new, device=q.device)
            if num_keys == 0:
                out[rows] = 0
                continue
            out[rows] = _attend(q[rows], cache, block_tables[some], num_keys, scores)
    return out


def attend_packed(new: HeadInputs, batch: Ragged, scores: Scores) -> Tensor | None:
    """See attention.PackedAttention; torch's kernel is FlashAttention-2 (https://arxiv.org/abs/2307.08691)."""
    (q, k, v, *changes), size, bounds = new, new.q.shape[2], batch.cu_q_lens
    is_narrow = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and has_matrix_units()
    is_plain = batch.longest_q > 0 and not scores.soft_cap and scores.sinks is None
    if not (is_narrow and is_plain) or size % 8 or size > _LARGEST_HEAD:
        return None
    if any(change is not None for change in changes):
        pairs = q.new_empty((len(k), 2, 1, *k.shape[1:]))  # a cache whose blocks have one slot
        q = store_kv(new, pairs, torch.arange(len(k), device=k.device))
        k, v = pairs[:, 0, 0], pairs[:, 1, 0]
    given = q, k, v, bounds, bounds, batch.longest_q, batch.longest_q, 0.0, False, False
    sides = dict.fromkeys(("window_size_left", "window_size_right"), scores.sliding_window - 1)  # -1: none
    out: Tensor = torch.ops.aten._flash_attention_forward(*given, scale=scores.scale, **sides)[0]
    return out


def _alike(
    num_new: list[int], num_keys: list[int], device: torch.device
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the numbers of new tokens and of keys, and the requests that have so many."""
    groups: dict[tuple[int, int], list[int]] = {}
    for request, lengths in enumerate(zip(num_new, num_keys, strict=True)):
        groups.setdefault(lengths, []).append(request)
    for (new, keys), requests in groups.items():
        if new:
            yield new, keys, torch.tensor(requests, device=device)


def _attend(q: Tensor, cache: Tensor, tables: Tensor, num_keys: int, scores: Scores) -> Tensor:
    """Attend for requests alike. q: [N, new tokens, num_heads, head_dim], and so the result"""
    block_size, window, oldest = cache.shape[2], scores.sliding_window, num_keys - q.shape[1]
    first = max(0, oldest - window + 1) if window else 0  # earlier blocks may be gone
    block, skipped = divmod(first, block_size)
    blocks = cache[tables[:, block : -(-num_keys // block_size)].long()]
    seen = slice(skipped, skipped + num_keys - first)
    keys, values = (blocks[:, :, i].flatten(1, 2)[:, seen].transpose(1, 2) for i in (0, -1))
    mask = None
    if window:
        places = torch.arange(first, num_keys, device=q.device)
        mask = (torch.arange(oldest, num_keys, device=q.device)[:, None] - places).abs() < window
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, mask, scale=scores.scale, enable_gqa=q.shape[2] != cache.shape[3]
    )
    return out.transpose(1, 2)
