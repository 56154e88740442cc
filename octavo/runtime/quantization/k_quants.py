"""Rounds matrices to GGUF's block types, to nearest: Q4_0, Q5_0, Q8_0, and the K types Q4_K, Q5_K and Q6_K.

Called while a plain checkpoint is loaded (`quantization="q4_k"`) and by `octavo quantize`. A K type has
blocks of 256 weights, whose parts of 32 (or 16) have scales that are themselves rounded under one float16.
Among a few scales of each part the one with the least squared error is taken, as in llama.cpp's
make_qkx2_quants and make_qx_quants. Formats: ggml-quants.h of https://github.com/ggml-org/ggml.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.base.errors import Unsupported
from octavo.runtime.kernels.block_types import TYPES_BY_NAME
from octavo.runtime.quantization.blocks import Blocks
from octavo.runtime.quantization.q8_0 import pack

_AT_ONCE = 1 << 22  # weights: bounds what is computed on the way
_TRIES = 20
_TINY = 1e-15


def quantize(matrix: Tensor, type_name: str) -> Blocks:
    """Return a matrix [rows, columns] of any floating-point type, or some, in blocks. Raises Unsupported."""
    kind = TYPES_BY_NAME[type_name]
    if type_name not in ROUND:
        raise Unsupported(f"Weights are not rounded to {type_name}, only to {', '.join(sorted(ROUND))}.")
    *rows, columns = matrix.shape
    if columns % kind.block:
        raise Unsupported(f"{type_name} keeps {kind.block} columns in a block, which {columns} do not fill.")
    parts = torch.split(matrix.reshape(-1, kind.block), _AT_ONCE // kind.block)
    packed = torch.cat([ROUND[type_name](part.float()) for part in parts])
    return Blocks(packed.view(*rows, -1), kind)


def _q8_0(x: Tensor) -> Tensor:
    return pack(x).data.view(len(x), -1)


def _q4_0(x: Tensor) -> Tensor:
    """Divide by the number of the largest size, which becomes -8."""
    scale = _signed_largest(x) / -8
    codes = (x * _inverse(scale) + 8.5).floor().clamp(0, 15).to(torch.uint8)
    return torch.cat([_bytes(scale.half()), codes[:, :16] | codes[:, 16:] << 4], 1)


def _q5_0(x: Tensor) -> Tensor:
    """The same with one bit more, which stand together."""
    scale = _signed_largest(x) / -16
    codes = (x * _inverse(scale) + 16.5).floor().clamp(0, 31).to(torch.uint8)
    places = torch.arange(8, dtype=torch.uint8, device=x.device)
    high = ((codes >> 4).view(-1, 4, 8) << places).sum(-1, dtype=torch.uint8)
    low = codes & 15
    return torch.cat([_bytes(scale.half()), high, low[:, :16] | low[:, 16:] << 4], 1)


def _q4_or_5_k(bits: int, x: Tensor) -> Tensor:
    """weight = d * scale * code - dmin * minimum; scales and minima of 32 weights have 6 bits."""
    top, parts = (1 << bits) - 1, x.view(-1, 8, 32)
    scales, mins = _scale_and_min(parts, top)
    d, dmin = (numbers.amax(1, keepdim=True).div(63).half() for numbers in (scales, mins))
    scales, mins = (
        (numbers * _inverse(unit.float())).round().clamp(0, 63)
        for numbers, unit in ((scales, d), (mins, dmin))
    )
    step, offset = d.float() * scales, dmin.float() * mins
    codes = ((parts + offset[..., None]) * _inverse(step)[..., None]).round().clamp(0, top).to(torch.uint8)
    s, m = scales.to(torch.uint8), mins.to(torch.uint8)
    heads = [
        s[:, :4] | s[:, 4:] >> 4 << 6,
        m[:, :4] | m[:, 4:] >> 4 << 6,
        s[:, 4:] & 15 | (m[:, 4:] & 15) << 4,
    ]
    low = codes & 15
    body = [(low[:, 0::2] | low[:, 1::2] << 4).flatten(1)]
    if bits == 5:
        shifts = torch.arange(8, dtype=torch.uint8, device=x.device)[:, None]
        body.insert(0, ((codes >> 4) << shifts).sum(1, dtype=torch.uint8))
    return torch.cat([_bytes(d), _bytes(dmin), *heads, *body], 1)


def _q6_k(x: Tensor) -> Tensor:
    """weight = d * scale * (code - 32); scales of 16 weights have 8 bits."""
    parts = x.view(-1, 16, 16)
    scales = _scale(parts, 32)
    d = (_signed_largest(scales) / -128).half()
    whole = (scales * _inverse(d.float())).round().clamp(-128, 127)
    step = d.float() * whole
    codes = (parts * _inverse(step)[..., None]).round().clamp(-32, 31) + 32
    rows = codes.to(torch.uint8).view(-1, 2, 4, 32)
    low, high = rows & 15, rows >> 4
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=x.device)[:, None]
    body = [
        (low[:, :, :2] | low[:, :, 2:] << 4).flatten(1),
        (high << shifts).sum(2, dtype=torch.uint8).flatten(1),
    ]
    return torch.cat([*body, whole.to(torch.int8).view(torch.uint8), _bytes(d)], 1)


def _scale_and_min(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return scales and minima, from 0 on, of parts [..., size] for codes of 0 to `top`.

    x is about scale * code - minimum. Numbers count by their size and by what is usual in their part.
    """
    weight = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True)
    total, total_x = weight.sum(-1, keepdim=True), (weight * x).sum(-1, keepdim=True)
    best_scale, best_min = (high - low) / top, low
    least = torch.full_like(low, torch.inf)
    for attempt in range(_TRIES + 1):
        given = (top if attempt == 0 else top - 1 + 0.1 * attempt) * _inverse(high - low)
        codes = ((x - low) * given).round().clamp(0, top)
        weighted = weight * codes
        sum_l, sum_l2, sum_xl = (t.sum(-1, keepdim=True) for t in (weighted, weighted * codes, weighted * x))
        determinant = total * sum_l2 - sum_l.square()
        scale = (total * sum_xl - total_x * sum_l) * _inverse(determinant)
        offset = (sum_l2 * total_x - sum_l * sum_xl) * _inverse(determinant)
        scale = torch.where(offset > 0, sum_xl * _inverse(sum_l2), scale)
        offset = offset.clamp(max=0)
        error = (weight * (scale * codes + offset - x).square()).sum(-1, keepdim=True)
        better = (error < least) & (determinant > 1e-5 * total * sum_l2)
        least = torch.where(better, error, least)
        best_scale = torch.where(better, scale, best_scale)
        best_min = torch.where(better, offset, best_min)
    return best_scale[..., 0].clamp(min=0), -best_min[..., 0]


def _scale(x: Tensor, top: int) -> Tensor:
    """Return scales of parts [..., size] for codes of -top to top - 1."""
    largest = _signed_largest(x)
    best, most = -largest / top, torch.full_like(largest, -1.0)
    weight = x.square()
    for attempt in range(-9, 10):
        codes = (x * (-(top + 0.1 * attempt) * _inverse(largest))).round().clamp(-top, top - 1)
        sum_xl, sum_l2 = ((weight * t).sum(-1, keepdim=True) for t in (x * codes, codes.square()))
        gain = sum_xl.square() * _inverse(sum_l2)
        best = torch.where(gain > most, sum_xl * _inverse(sum_l2), best)
        most = torch.maximum(most, gain)
    return best[..., 0]


def _signed_largest(x: Tensor) -> Tensor:
    """Return the number of the largest size in each row, [..., 1]."""
    return x.gather(-1, x.abs().argmax(-1, keepdim=True))


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x.abs() > _TINY, 1 / x, 0)


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


ROUND: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q4_K": partial(_q4_or_5_k, 4),
    "Q5_K": partial(_q4_or_5_k, 5),
    "Q6_K": _q6_k,
}
"""Take blocks [B, weights of a block] float32; return their bytes [B, bytes of a block]."""
