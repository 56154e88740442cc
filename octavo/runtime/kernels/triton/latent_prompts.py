"""Latent attention of prompts without cached tokens, in the plain form: keys and values of every head.

A pair of tokens takes plain_size + rope_size + value_size products a head, 320 in DeepSeek's models, and 1088
in the absorbed form; to make keys and values costs what bringing queries to the latents and back does. But
keys of cached tokens would be made again for every chunk, so behind those the absorbed form stays.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.attention import PlainPrompts
from octavo.runtime.kernels.triton.launch import fits, has_matrix_units, overlapped, power_of_2, release, wait
from octavo.runtime.kernels.triton.online_softmax import locate

_LOG2_E = 1.4426950408889634


# fmt: off
@triton.jit
def _rows(source, places, size, there, SIZE: tl.constexpr, PAD: tl.constexpr, DOT: tl.constexpr):
    """Load SIZE numbers of rows at `places`, `size` apart; zeros where none is there."""
    d = tl.arange(0, PAD)
    source += (places.to(tl.int64) * size)[:, None] + d[None, :]
    return tl.load(source, mask=there[:, None] & (d < SIZE)[None, :], other=0.0).to(DOT)


@triton.jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["cu_q_lens"])
def _plain_kernel(
    q, q_rope, made, k_rope, cu_q_lens, out, stride_q, stride_q_rope, stride_k_rope, num_requests, scale,
    NUM_HEADS: tl.constexpr, PLAIN: tl.constexpr, PLAIN_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, HEAD: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):
    """Attend for a tile of one head's queries; the last begin. HEAD: from one head of q_rope to the next."""
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    _, begin, q_len, first_q = locate(cu_q_lens, tile, num_requests, TILE_M)
    wait(PDL)
    if first_q >= q_len:
        return
    SIZE: tl.constexpr = PLAIN + VALUE
    row, place = first_q + tl.arange(0, TILE_M), tl.arange(0, TILE_K)
    real = row < q_len
    plain = _rows(q + head * (PLAIN + ROPE), begin + row, stride_q, real, PLAIN, PLAIN_PAD, DOT)
    turned = _rows(q_rope + head * HEAD, begin + row, stride_q_rope, real, ROPE, ROPE_PAD, DOT)
    made += head * SIZE
    maxima, sums = tl.full([TILE_M], float("-inf"), tl.float32), tl.zeros([TILE_M], tl.float32)
    total = tl.zeros([TILE_M, VALUE_PAD], tl.float32)
    end_key = tl.minimum(first_q + TILE_M, q_len)
    whole_end = (first_q + 1) // TILE_K * TILE_K
    for masked in tl.static_range(2):
        for start in range(whole_end if masked else 0, end_key if masked else whole_end, TILE_K):
            key = start + place
            there = key < end_key if masked else key >= 0
            keys = _rows(made, begin + key, NUM_HEADS * SIZE, there, PLAIN, PLAIN_PAD, DOT)
            rope = _rows(k_rope, begin + key, stride_k_rope, there, ROPE, ROPE_PAD, DOT)
            scores = tl.dot(plain, tl.trans(keys), input_precision="ieee")
            scores = tl.dot(turned, tl.trans(rope), scores, input_precision="ieee") * scale
            if masked:
                scores = tl.where(there[None, :] & (key[None, :] <= row[:, None]), scores, float("-inf"))
            higher = tl.maximum(maxima, tl.max(scores, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - shift[:, None])
            fade = tl.exp2(maxima - shift)
            values = _rows(made + PLAIN, begin + key, NUM_HEADS * SIZE, there, VALUE, VALUE_PAD, DOT)
            total = tl.dot(weights.to(DOT), values, total * fade[:, None], input_precision="ieee")
            sums = sums * fade + tl.sum(weights, 1)
            maxima = higher
    release(PDL)
    total = total / tl.where(sums == 0.0, 1.0, sums)[:, None]
    d = tl.arange(0, VALUE_PAD)
    target = out + ((begin + row).to(tl.int64) * NUM_HEADS + head)[:, None] * VALUE + d[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=real[:, None] & (d < VALUE)[None, :])
# fmt: on


def latent_prompts(prompts: PlainPrompts, out: Tensor) -> None:
    """See attention.LatentPrompts."""
    q, q_rope, made, k_rope, cu_q_lens, scale = prompts
    (tokens, num_heads, _), rope = q.shape, k_rope.shape[1]
    plain = q.shape[2] - rope
    value = made.shape[2] - plain
    assert made.is_contiguous() and out.is_contiguous() and k_rope.stride(1) == 1
    tiles = _tiles(q.dtype, 2 * (plain + rope), 2 * (plain + rope + value))
    num_requests = len(cu_q_lens) - 1
    tensors = q, q_rope, made, k_rope, cu_q_lens, out
    strides = q.stride(0), q_rope.stride(0), k_rope.stride(0)
    parts = {"PLAIN": plain, "ROPE": rope, "VALUE": value}
    padded = {f"{name}_PAD": max(16, power_of_2(size)) for name, size in parts.items()}
    heads = {"NUM_HEADS": num_heads, "HEAD": q_rope.stride(1)}
    grid = num_heads, tokens // tiles["TILE_M"] + num_requests
    _plain_kernel[grid](
        *tensors, *strides, num_requests, scale * _LOG2_E, **heads, **parts, **padded, **tiles, **overlapped()
    )


def _tiles(dtype: torch.dtype, query_bytes: int, key_bytes: int) -> dict[str, Any]:
    """Return tiles for queries, and keys with values, of so many bytes."""
    dot = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype)
    if dot is None or triton.knobs.runtime.interpret:
        return {"TILE_M": 32, "TILE_K": 32, "DOT": tl.float32, "num_warps": 4, "num_stages": 2}
    if not has_matrix_units():
        return {"TILE_M": 16, "TILE_K": 32, "DOT": dot, "num_warps": 4, "num_stages": 2}
    if not fits(3, 64 * key_bytes, 128 * query_bytes):
        return {"TILE_M": 64, "TILE_K": 32, "DOT": dot, "num_warps": 4, "num_stages": 2}
    return {"TILE_M": 128, "TILE_K": 64, "DOT": dot, "num_warps": 8, "num_stages": 3}
