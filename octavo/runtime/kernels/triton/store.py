"""From a layer's projections to its cache in one kernel: norms of heads, rotation, store."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.attention import HeadInputs
from octavo.runtime.kernels.triton.launch import cdiv, overlapped, power_of_2, release, wait

_ELEMENTS = 1024  # of one program, where there are many tokens


@triton.jit
def _narrow(value, target):
    """Convert to the elements of `target`; 8-bit floats have no infinity to overflow to."""
    kind: tl.constexpr = target.dtype.element_ty
    if kind == tl.float8e4nv:
        value = tl.clamp(value, -448.0, 448.0)
    return value.to(kind)


# fmt: off
@triton.jit
def _heads(
    source, target, weight, cos, sin, inside, pair, eps, scale,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr,
    ROTATE: tl.constexpr, LATE: tl.constexpr, SCALED: tl.constexpr,
):
    """Bring whole heads at `source` [ROWS] to `target` [ROWS], the last NORMED normalised, and rotated.

    LATE: weights of the norm multiply what is rotated; lengths are the same.

    Components are taken in the pairs that rotate together, then those that do not rotate (pair ≥ HALF).
    """
    rotated = pair < HALF
    first = pair * (2 if INTERLEAVED else 1)
    second = first + (1 if INTERLEAVED else HALF)
    has_second = inside & rotated[None, :]
    has_first = has_second
    if D > 2 * HALF:
        first = tl.where(rotated, first, HALF + pair)
        has_first = inside & (first < D)[None, :]
    a = tl.load(source[:, None] + first[None, :], mask=has_first, other=0.0).to(tl.float32)
    b = tl.load(source[:, None] + second[None, :], mask=has_second, other=0.0).to(tl.float32)
    if NORMED > 0:
        kept: tl.constexpr = D - NORMED
        normed_a, normed_b = first >= kept, second >= kept
        squares = tl.where(normed_a, a * a, 0.0) + tl.where(normed_b, b * b, 0.0)
        factor = tl.rsqrt(tl.sum(squares, 1) / NORMED + eps)[:, None]
        mask_a, mask_b = normed_a & (first < D), normed_b & rotated
        weight_a = tl.load(weight + first - kept, mask=mask_a, other=0.0).to(tl.float32)[None, :]
        weight_b = tl.load(weight + second - kept, mask=mask_b, other=0.0).to(tl.float32)[None, :]
        kind: tl.constexpr = source.dtype.element_ty
        if not LATE:
            a = tl.where(normed_a, (a * factor * weight_a).to(kind).to(tl.float32), a)
            b = tl.where(normed_b, (b * factor * weight_b).to(kind).to(tl.float32), b)
    if ROTATE:
        c = tl.load(cos + pair, mask=rotated, other=1.0)[None, :]
        s = tl.load(sin + pair, mask=rotated, other=0.0)[None, :]
        a, b = a * c - b * s, b * c + a * s
    if NORMED > 0 and LATE:
        a, b = a * factor * weight_a, b * factor * weight_b
    if SCALED:
        a, b = a * scale, b * scale
    tl.store(target[:, None] + first[None, :], _narrow(a, target), mask=has_first)
    tl.store(target[:, None] + second[None, :], _narrow(b, target), mask=has_second)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store_kernel(
    q, k, v, cache, slots, out, cos, sin, q_weight, k_weight, q_factors,
    stride_q, stride_k, stride_v, stride_out, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    HALVES: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, Q_ROWS: tl.constexpr,
    Q_WIDTH: tl.constexpr, Q_GROUPS: tl.constexpr, INTERLEAVED: tl.constexpr, Q_NORMED: tl.constexpr,
    K_NORMED: tl.constexpr, ROTATE: tl.constexpr, LATE: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):
    """Store heads of one token: programs of queries first, if these change, then of keys, of values.

    Q_WIDTH: of pairs of a query; of a latent cache only those that rotate, which it changes in place.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, WIDTH)
    k_groups: tl.constexpr = (KV_HEADS + ROWS - 1) // ROWS
    cos += token * HALF
    sin += token * HALF
    slot = tl.load(slots + token)
    wait(PDL)
    release(PDL)
    if group < Q_GROUPS:
        head = group * Q_ROWS + tl.arange(0, Q_ROWS)
        inside = (head < HEADS)[:, None]
        scale = 1.0
        if SCALED:
            scale = tl.load(q_factors + token)
        _heads(
            q + token * stride_q + head * D, out + token * stride_out + head * D, q_weight, cos, sin, inside,
            tl.arange(0, Q_WIDTH), eps, scale, 2 * HALF if HALVES == 1 and Q_NORMED == 0 else D, HALF,
            INTERLEAVED, Q_NORMED, ROTATE, LATE, SCALED,
        )
    else:
        if slot >= 0:
            size: tl.constexpr = KV_HEADS * D
            place = cache + (slot // BLOCK_SIZE * HALVES * BLOCK_SIZE + slot % BLOCK_SIZE) * size
            if group < Q_GROUPS + k_groups:
                head = (group - Q_GROUPS) * ROWS + tl.arange(0, ROWS)
                inside = (head < KV_HEADS)[:, None]
                _heads(
                    k + token * stride_k + head * D, place + head * D, k_weight, cos, sin, inside, pair, eps,
                    1.0, D, HALF, INTERLEAVED, K_NORMED, ROTATE, LATE, False,
                )
            else:
                head = (group - Q_GROUPS - k_groups) * ROWS + tl.arange(0, ROWS)
                inside = (head < KV_HEADS)[:, None]
                place += BLOCK_SIZE * size
                _heads(
                    v + token * stride_v + head * D, place + head * D, k_weight, cos, sin, inside, pair, eps,
                    1.0, D, HALF, INTERLEAVED, 0, False, False, False,
                )
# fmt: on


def store_kv(new: HeadInputs, cache: Tensor, slots: Tensor) -> Tensor:
    """See attention.StoreKV."""
    q, k, v, rotation, norms, q_factors = new
    assert cache.is_contiguous()
    tokens, heads, head_dim = q.shape
    kv_heads, halves = k.shape[1], cache.shape[1]
    q_weight, k_weight, eps, is_late = norms or (None, None, 0.0, False)
    in_place = halves == 1 and q_weight is None
    changed = rotation is not None or q_weight is not None or q_factors is not None
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if changed and not in_place else q
    if not tokens:
        return out
    cos, sin, interleaved = rotation or (q, q, False)
    half = head_dim // 2 if rotation is None else cos.shape[-1]
    width = power_of_2(head_dim - half)
    rows = q_rows = _rows(tokens, heads, kv_heads, width)
    q_width = power_of_2(half) if in_place else width
    if in_place:
        q_rows = max(1, min(power_of_2(heads), _ELEMENTS // q_width))
    q_groups = cdiv(heads, q_rows) if changed else 0
    weights = (q if tensor is None else tensor for tensor in (q_weight, k_weight, q_factors))
    tensors = q, k, v, cache, slots, out, cos, sin, *weights
    strides = q.stride(0), k.stride(0), v.stride(0), out.stride(0)
    heads_of = {"HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim, "HALF": half}
    cache_of = {"HALVES": halves, "BLOCK_SIZE": cache.shape[2]}
    tiles = {"WIDTH": width, "ROWS": rows, "Q_ROWS": q_rows, "Q_WIDTH": q_width, "Q_GROUPS": q_groups}
    normed = {
        "Q_NORMED": 0 if q_weight is None else head_dim,
        "K_NORMED": 0 if k_weight is None else len(k_weight),
    }
    rotated = {"INTERLEAVED": interleaved, "ROTATE": rotation is not None, "LATE": is_late}
    rotated["SCALED"] = q_factors is not None
    compiled: dict[str, Any] = heads_of | cache_of | tiles | normed | rotated
    num_warps = 4 if max(rows * width, q_rows * q_width) >= 256 else 1
    grid = tokens, halves * cdiv(kv_heads, rows) + q_groups
    _store_kernel[grid](*tensors, *strides, eps, num_warps=num_warps, **compiled, **overlapped())
    return out


def _rows(tokens: int, heads: int, kv_heads: int, width: int) -> int:
    """Return the heads of one program: few where that is needed to occupy the device."""
    rows = min(power_of_2(kv_heads), max(1, _ELEMENTS // width))
    while rows > 1 and tokens * (heads + 2 * kv_heads) < rows * 256:
        rows //= 2
    return rows
