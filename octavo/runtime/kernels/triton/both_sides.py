"""Attention to both sides, as encoders and the tokens of an image have it, by torch's fused kernels.

Sequences of equal lengths are one call: keys and values are gathered from the paged cache for it. The lengths
are read from the device by the first layer, which waits for them; none of these steps is captured.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.attention import Ragged, Scores
from octavo.runtime.kernels.ref.cache import paged_attention as reference

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
    first = max(0, oldest - window + 1) // block_size if window else 0  # earlier blocks may be gone
    blocks = cache[tables[:, first : -(-num_keys // block_size)].long()]
    end = num_keys - first * block_size
    keys, values = (blocks[:, :, i].flatten(1, 2)[:, :end].transpose(1, 2) for i in (0, -1))
    mask = None
    if window:
        places = torch.arange(first * block_size, num_keys, device=q.device)
        mask = (torch.arange(oldest, num_keys, device=q.device)[:, None] - places).abs() < window
    seen = functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, mask, scale=scores.scale, enable_gqa=q.shape[2] != cache.shape[3]
    )
    return seen.transpose(1, 2)
