"""References of the kernels over the paged cache: gather, mask, softmax. Slow and obvious on purpose."""

import torch
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.attention import HeadInputs, HeadNorms, Pieces, Ragged, Rotation, Scores, Share
from octavo.runtime.kernels.cache_layout import rounded, rounded_parts
from octavo.runtime.kernels.ref.elementwise import rms_norm


def store_kv(new: HeadInputs, cache: Tensor, slots: Tensor) -> Tensor:
    """See attention.StoreKV."""
    q, k, v, rotation, norms, q_factors = new
    if norms is not None and not norms.follows_rotation:
        q, k = _normed(q, k, norms)
    if rotation is not None:
        q, k = _rotated(q, rotation), _rotated(k, rotation)
    if norms is not None and norms.follows_rotation:
        q, k = _normed(q, k, norms)
    if q_factors is not None:
        q = (q.float() * q_factors[:, None, None]).to(q.dtype)
    keep = slots >= 0
    blocks, offsets = slots[keep] // cache.shape[2], slots[keep] % cache.shape[2]
    largest = 448.0 if cache.dtype == torch.float8_e4m3fn else float("inf")
    for index, vectors in enumerate((k, v)[: cache.shape[1]]):
        if cache.dtype == torch.int8:
            for part, numbers in zip(rounded_parts(cache), rounded(vectors[keep]), strict=True):
                part[blocks, index, offsets] = numbers
        else:
            cache[blocks, index, offsets] = vectors[keep].clamp(-largest, largest).to(cache.dtype)
    return q


def _normed(q: Tensor, k: Tensor, norms: HeadNorms) -> tuple[Tensor, Tensor]:
    q = q if norms.q_weight is None else rms_norm(q, norms.q_weight, norms.eps)
    plain, normed = torch.split(k, [k.shape[-1] - len(norms.k_weight), len(norms.k_weight)], -1)
    return q, torch.cat([plain, rms_norm(normed, norms.k_weight, norms.eps)], -1)


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    cos, sin, interleaved = rotation
    half = cos.shape[-1]
    x = x.clone()
    rotated = x[..., : 2 * half]
    first, second = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    a, b = first.float(), second.float()
    c, s = cos[:, None, :], sin[:, None, :]
    new_first, new_second = a * c - b * s, b * c + a * s
    first.copy_(new_first)
    second.copy_(new_second)
    return x


def paged_attention(
    q: Tensor, cache: Tensor, block_tables: Tensor, batch: Ragged, scores: Scores, share: Share | None = None
) -> Tensor:
    """See attention.PagedAttention; nothing is rounded here."""
    if share is not None:
        return _attend_to_share(q, cache, block_tables, batch, scores, share)
    scale, sliding_window, soft_cap, _, is_causal, _, sinks = scores
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts = batch.cu_q_lens.tolist()
    for request, kv_len in enumerate(batch.kv_lens.tolist()):
        start, end = starts[request], starts[request + 1]
        if kv_len == 0:
            out[start:end] = 0.0
            continue
        oldest = kv_len - (end - start)  # position of the first query
        first = max(0, oldest - sliding_window + 1) if sliding_window else 0
        keys, values = _gather(cache, block_tables[request], first, kv_len, q.shape[1])
        products = torch.einsum("qhd,khd->hqk", q[start:end].float(), keys) * scale
        if soft_cap:
            products = soft_cap * torch.tanh(products / soft_cap)
        distance = (
            torch.arange(oldest, kv_len, device=q.device)[:, None]
            - torch.arange(first, kv_len, device=q.device)[None, :]
        )
        hidden = (distance < 0) & is_causal
        if sliding_window:
            hidden |= distance.abs() >= sliding_window
        products = products.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            products = torch.cat([products, sinks[:, None, None].expand(-1, end - start, 1)], -1)
        weights = products.softmax(-1)[..., : kv_len - first]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def _attend_to_share(
    q: Tensor, cache: Tensor, block_tables: Tensor, batch: Ragged, scores: Scores, share: Share
) -> Tensor:
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    share.log_sums.fill_(float("-inf"))
    starts = batch.cu_q_lens.tolist()
    for request, kv_len in enumerate(batch.kv_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        if kv_len == 0:
            continue
        keys, values = _gather(cache, block_tables[request], 0, kv_len, q.shape[1])
        products = torch.einsum("qhd,khd->qhk", q[rows].float(), keys) * scores.scale
        if scores.soft_cap:
            products = scores.soft_cap * torch.tanh(products / scores.soft_cap)
        hidden = torch.arange(kv_len, device=q.device) >= share.num_seen[rows, None]
        products = products.masked_fill(hidden[:, None], float("-inf"))
        share.log_sums[rows] = products.logsumexp(-1)
        weights = products.softmax(-1).nan_to_num(0.0)  # of queries without a key
        out[rows] = torch.einsum("qhk,khd->qhd", weights, values).to(q.dtype)
    return out


def _gather(cache: Tensor, table: Tensor, first: int, kv_len: int, num_heads: int) -> list[Tensor]:
    """Return keys and values from position first on: two of [positions, num_heads, head_dim] float32."""
    positions = torch.arange(first, kv_len, device=cache.device)
    blocks, offsets = table[positions // cache.shape[2]].long(), positions % cache.shape[2]
    group = num_heads // cache.shape[3]
    halves = (0, cache.shape[1] - 1)
    return [_floats(cache, blocks, half, offsets).repeat_interleave(group, dim=1) for half in halves]


def _floats(cache: Tensor, blocks: Tensor, which: int, offsets: Tensor) -> Tensor:
    if cache.dtype != torch.int8:
        return cache[blocks, which, offsets].float()
    values, scales = (part[blocks, which, offsets] for part in rounded_parts(cache))
    return values.float() * scales[..., None]


def cut_chunks(batch: Ragged, block_tables: Tensor, size: int, blocks: int, most: int) -> Pieces:
    """See attention.CutChunks."""
    singles, count, device = batch.num_singles, len(batch.kv_lens), block_tables.device
    places = torch.arange(singles + (count - singles) * most, device=device)
    behind = (places - singles).clamp(min=0)
    requests = torch.where(places < singles, places, singles + behind // most)
    firsts, ends = batch.cu_q_lens[requests], batch.kv_lens[requests]
    lengths = batch.cu_q_lens.diff()[requests]
    begins = (ends - lengths).clamp(min=0)
    chunks = begins // size + behind % most
    taken = (chunks * size - begins).clamp(min=0).minimum(lengths)
    cu_q_lens = torch.cat([firsts + taken, batch.cu_q_lens[-1:]]).int()
    seen = (ends - chunks * size).clamp(max=size).maximum(ends.clamp(max=1))
    columns = torch.arange(blocks, device=device) + (chunks * blocks)[:, None]
    own = block_tables[requests[:, None], columns.clamp(max=block_tables.shape[1] - 1)]
    return Pieces(cu_q_lens, seen.int(), own.contiguous())


def distance_attention(
    q: Tensor, cache: Tensor, block_tables: Tensor, batch: Ragged, terms: Tensor, scale: float
) -> Tensor:
    """See attention.DistanceAttention."""
    parts, bounds = [q[:0]], batch.cu_q_lens.tolist()
    requests = zip(bounds[:-1], bounds[1:], batch.kv_lens.tolist(), block_tables, strict=True)
    for start, end, length, table in requests:
        blocks = table[: -(-length // cache.shape[2])].long()
        kept = cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].to(q.dtype)
        places = torch.arange(length, device=q.device)
        behind = places[length - (end - start) :, None] - places
        added = terms[behind.clamp(0, len(terms) - 1)].masked_fill((behind < 0)[..., None], float("-inf"))
        query, key, value = (x.transpose(0, 1) for x in (q[start:end], *kept))
        mask = added.permute(2, 0, 1).to(q.dtype)
        out = functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)
