"""References of the kernels over packed blocks: unpack with torch ops, then multiply.

Formats: block_types.py, and ggml-quants.h of https://github.com/ggml-org/ggml. B = blocks. Every unpacker
takes the raw bytes [B, bytes per block] and returns the values [B, values per block] in float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.block_types import BFLOAT16_TYPES, INTEGER_TYPES
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.group_blocks import GROUP_UNPACKERS, nibbles

_ROWS_AT_ONCE = 4096  # bounds the memory of an unpacked language model head
_LARGEST = {"int8": 127, "int16": 32767}
BYTES = {"F8": torch.float8_e4m3fn, "S8": torch.int8}
"""Types of nothing but codes."""


def block_dequantize(matrix: Packed, places: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """See linear.BlockDequantize."""
    if matrix.scales is not None:
        return dequantize_bytes(matrix, places) * scale
    blocks = matrix.blocks if places is None else matrix.blocks[places]
    values = _UNPACKERS[matrix.type_name](blocks.reshape(-1, matrix.kind.num_bytes))
    rows = values.reshape(len(blocks), matrix.num_inputs)
    return rows if scale == 1.0 else rows * scale


def block_matmul(x: Tensor, matrix: Packed, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """See linear.BlockMatmul; rounds, then multiplies what the integers stand for."""
    blocks, type_name, input_precision, scales = matrix
    if scales is not None:
        codes, x_scales = round_rows(x, type_name, in_groups=scales.dim() == 2)
        x = (codes.view(*x_scales.shape, -1).to(x.dtype) * x_scales[..., None].to(x.dtype)).view(x.shape)
        made = functional.linear(x, dequantize_bytes(matrix).to(x.dtype), bias)
        return made if out is None else out.copy_(made)
    rounded = input_precision == "bfloat16" and type_name in BFLOAT16_TYPES
    if input_precision in _LARGEST and type_name in INTEGER_TYPES:
        x = _round_parts(x, _LARGEST[input_precision])

    def value(number: Tensor) -> Tensor:
        return (number.bfloat16() if rounded else number).to(x.dtype)

    parts = [
        functional.linear(value(x), value(block_dequantize(matrix._replace(blocks=part))))
        for part in torch.split(blocks, _ROWS_AT_ONCE)
    ]
    made = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    made = made if bias is None else made + bias
    return made if out is None else out.copy_(made)


def dequantize_bytes(matrix: Packed, places: Tensor | None = None) -> Tensor:
    """Unpack bytes with scales beside them: all rows, or those at `places`, in float32."""
    assert matrix.scales is not None
    n, scales = len(matrix.blocks), matrix.scales.view(len(matrix.scales), -1)
    rows = torch.arange(n, device=scales.device) if places is None else places
    codes = matrix.blocks[rows].view(BYTES[matrix.type_name]).float()
    wide = codes.view(len(rows), scales.shape[1], -1) * scales[rows // (n // len(scales))][..., None]
    return wide.flatten(1)


def round_rows(x: Tensor, type_name: str, *, in_groups: bool) -> tuple[Tensor, Tensor]:
    """Round each row of x [M, K], or each 128 numbers of it, by the largest: bytes [M, K], scales [M, G]."""
    wide = x.float().view(len(x), -1, 128 if in_groups else x.shape[1])
    largest = 448.0 if type_name == "F8" else 127.0
    scales = wide.abs().amax(-1).clamp(min=1e-20) * (1 / largest)
    whole = wide * (1 / scales)[..., None]
    whole = whole.clamp(-largest, largest) if type_name == "F8" else (whole + 0.5).floor()
    return whole.to(BYTES[type_name]).view(x.shape), scales


def select_inputs(x: Tensor, places: Tensor) -> Tensor:
    """See linear.SelectInputs."""
    return torch.where(places < 0, 0, x[:, places.clamp(min=0).long()])


def _round_parts(x: Tensor, largest: int) -> Tensor:
    """Round every 32 numbers to whole multiples of one scale, `largest` of which make the largest of them."""
    parts = x.reshape(*x.shape[:-1], -1, 32)
    top = parts.abs().amax(-1, keepdim=True)
    factors = top.new_tensor(largest) / top  # `largest / top` would round twice, and not as kernels do
    whole = (parts * torch.where(top > 1e-30, factors, 0)).round()
    return (whole * (top / largest)).flatten(-2)


def _half(raw: Tensor) -> Tensor:
    """Read two bytes as a float16 scale: [B, 2] to [B, 1] float32."""
    return raw.contiguous().view(torch.float16).float()


def _bits(raw: Tensor) -> Tensor:
    """Split [B, 4] bytes into their 32 bits [B, 32], lowest first."""
    return ((raw[:, :, None] >> torch.arange(8, device=raw.device)) & 1).flatten(1)


def _f32(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.float32)


def _f16(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.float16).float()


def _bf16(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.bfloat16).float()


def _q8_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * b[:, 2:].contiguous().view(torch.int8)


def _q4_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (nibbles(b[:, 2:]).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * nibbles(b[:, 4:]) + _half(b[:, 2:4])


def _q5_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * ((nibbles(b[:, 6:]) | _bits(b[:, 2:6]) << 4).float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (nibbles(b[:, 8:]) | _bits(b[:, 4:8]) << 4) + _half(b[:, 2:4])


def scales_and_mins(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 12 bytes of a K block: eight 6-bit scales and eight 6-bit minima, two of [B, 8, 1]."""
    low, middle, high = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6) << 4], dim=1)
    mins = torch.cat([middle & 63, (high >> 4) | (middle >> 6) << 4], dim=1)
    return scales[:, :, None], mins[:, :, None]


def _q4_k(b: Tensor) -> Tensor:
    scales, mins = scales_and_mins(b[:, 4:16])
    q = nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (_half(b[:, :2])[:, :, None] * scales * q - _half(b[:, 2:4])[:, :, None] * mins).flatten(1)


def _q5_k(b: Tensor) -> Tensor:
    scales, mins = scales_and_mins(b[:, 4:16])
    fifth = (b[:, None, 16:48] >> torch.arange(8, device=b.device)[:, None]) & 1
    q = nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth << 4
    return (_half(b[:, :2])[:, :, None] * scales * q - _half(b[:, 2:4])[:, :, None] * mins).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    low = nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, device=b.device)[:, None]
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    q = (low | high << 4).reshape(-1, 16, 16).float() - 32
    scales = b[:, 192:208].contiguous().view(torch.int8)[:, :, None]
    return (_half(b[:, 208:])[:, :, None] * scales * q).flatten(1)


_UNPACKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    **GROUP_UNPACKERS,
}
