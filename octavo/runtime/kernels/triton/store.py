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
    source, target, weight, cos, sin, inside, pair, eps,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
):
    """Bring whole heads at `source` [ROWS] to `target` [ROWS], normalised, then rotated.

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
    if NORM:
        factor = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
        weight_a = tl.load(weight + first, mask=first < D, other=0.0).to(tl.float32)[None, :]
        weight_b = tl.load(weight + second, mask=rotated, other=0.0).to(tl.float32)[None, :]
        kind: tl.constexpr = source.dtype.element_ty
        a = (a * factor * weight_a).to(kind).to(tl.float32)
        b = (b * factor * weight_b).to(kind).to(tl.float32)
    if ROTATE:
        c = tl.load(cos + pair, mask=rotated, other=1.0)[None, :]
        s = tl.load(sin + pair, mask=rotated, other=0.0)[None, :]
        a, b = a * c - b * s, b * c + a * s
    tl.store(target[:, None] + first[None, :], _narrow(a, target), mask=has_first)
    tl.store(target[:, None] + second[None, :], _narrow(b, target), mask=has_second)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store_kernel(
    q, k, v, cache, slots, out, cos, sin, q_weight, k_weight,
    stride_q, stride_k, stride_v, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    ROTATE: tl.constexpr, PDL: tl.constexpr,
):
    """Store ROWS heads of one token: programs of queries first, if these change, then of keys, of values."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, WIDTH)
    q_groups: tl.constexpr = (HEADS + ROWS - 1) // ROWS if NORM or ROTATE else 0
    k_groups: tl.constexpr = (KV_HEADS + ROWS - 1) // ROWS
    cos += token * HALF
    sin += token * HALF
    slot = tl.load(slots + token)
    wait(PDL)
    release(PDL)
    if group < q_groups:
        head = group * ROWS + tl.arange(0, ROWS)
        inside = (head < HEADS)[:, None]
        target = out + (token * HEADS + head) * D
        _heads(
            q + token * stride_q + head * D, target, q_weight, cos, sin, inside, pair, eps,
            D, HALF, INTERLEAVED, NORM, ROTATE,
        )
    else:
        if slot >= 0:
            size: tl.constexpr = KV_HEADS * D
            place = cache + (slot // BLOCK_SIZE * 2 * BLOCK_SIZE + slot % BLOCK_SIZE) * size
            if group < q_groups + k_groups:
                head = (group - q_groups) * ROWS + tl.arange(0, ROWS)
                inside = (head < KV_HEADS)[:, None]
                _heads(
                    k + token * stride_k + head * D, place + head * D, k_weight, cos, sin, inside, pair, eps,
                    D, HALF, INTERLEAVED, NORM, ROTATE,
                )
            else:
                head = (group - q_groups - k_groups) * ROWS + tl.arange(0, ROWS)
                inside = (head < KV_HEADS)[:, None]
                place += BLOCK_SIZE * size
                _heads(
                    v + token * stride_v + head * D, place + head * D, k_weight, cos, sin, inside, pair, eps,
                    D, HALF, INTERLEAVED, False, False,
                )
# fmt: on


def store_kv(new: HeadInputs, cache: Tensor, slots: Tensor) -> Tensor:
    """See attention.StoreKV."""
    q, k, v, rotation, norms = new
    assert cache.is_contiguous()
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    changed = rotation is not None or norms is not None
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if changed else q
    if not tokens:
        return out
    cos, sin, interleaved = rotation or (q, q, False)
    q_weight, k_weight, eps = norms or (q, q, 0.0)
    half = head_dim // 2 if rotation is None else cos.shape[-1]
    width = power_of_2(head_dim - half)
    rows = _rows(tokens, heads, kv_heads, width)
    groups = 2 * cdiv(kv_heads, rows) + (cdiv(heads, rows) if changed else 0)
    constants: dict[str, Any] = {"HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim, "HALF": half}
    _store_kernel[(tokens, groups)](
        q,
        k,
        v,
        cache,
        slots,
        out,
        cos,
        sin,
        q_weight,
        k_weight,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        eps,
        WIDTH=width,
        BLOCK_SIZE=cache.shape[2],
        ROWS=rows,
        INTERLEAVED=interleaved,
        NORM=norms is not None,
        ROTATE=rotation is not None,
        num_warps=4 if rows * width >= 256 else 1,
        **constants,
        **overlapped(),
    )
    return out


def _rows(tokens: int, heads: int, kv_heads: int, width: int) -> int:
    """Return the heads of one program: few where that is needed to occupy the device."""
    rows = min(power_of_2(kv_heads), max(1, _ELEMENTS // width))
    while rows > 1 and tokens * (heads + 2 * kv_heads) < rows * 256:
        rows //= 2
    return rows
