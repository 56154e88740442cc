"""References that unpack octavo's own block types (block_types.py) and MXFP4. Used by ref/blocks.py."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

NF4: tuple[float, ...] = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
NF4 += (-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0)
NF4 += (0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
NF4 += (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
_AMOUNTS = (0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
FP4 = _AMOUNTS + tuple(-amount for amount in _AMOUNTS)
"""Levels of bitsandbytes: https://github.com/bitsandbytes-foundation/bitsandbytes."""
_DOUBLED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
E2M1 = tuple(amount / 2 for amount in (*_DOUBLED, *(-amount for amount in _DOUBLED)))


def nibbles(raw: Tensor) -> Tensor:
    """Split [..., n] bytes into [..., 2 n] values: all low halves, then all high ones."""
    return torch.cat([raw & 15, raw >> 4], dim=-1)


def _two_bits(raw: Tensor) -> Tensor:
    """Split [B, 16] bytes into 64 values: all lowest pairs of bits, then the next."""
    return torch.cat([raw >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)


def _three_bits(raw: Tensor) -> Tensor:
    """Split 16 bytes of low bits, then 8 of high ones."""
    high = (raw[:, 16:, None] >> torch.arange(8, device=raw.device) & 1).flatten(1)
    return _two_bits(raw[:, :16]) | high << 2


def _signed(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.int8)


def _from_zero(quants: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    head = b[:, :4].contiguous().view(torch.float16).float()
    return head[:, :1] * (quants(b[:, 4:]).float() - head[:, 1:])


def _scaled(values: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    return b[:, :4].contiguous().view(torch.float32) * values(b[:, 4:]).float()


def _levels(table: tuple[float, ...], raw: Tensor) -> Tensor:
    return torch.tensor(table, device=raw.device)[nibbles(raw).long()]


def _float8(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float8_e4m3fn)


def _mxfp4(b: Tensor) -> Tensor:
    return torch.ldexp(_levels(E2M1, b[:, 1:]), b[:, :1].int() - 127)


def _nvfp4(b: Tensor) -> Tensor:
    factors = _float8(b[:, 4:8]).float().repeat_interleave(16, 1)
    return b[:, :4].contiguous().view(torch.float32) * factors * _levels(E2M1, b[:, 8:])


GROUP_UNPACKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "MXFP4": _mxfp4,
    "NV4_64": _nvfp4,
    "U2_64": partial(_from_zero, _two_bits),
    "U3_64": partial(_from_zero, _three_bits),
}
for _size in (32, 64):
    GROUP_UNPACKERS |= {
        f"U4_{_size}": partial(_from_zero, nibbles),
        f"U8_{_size}": partial(_from_zero, _signed),
        f"S8_{_size}": partial(_scaled, _signed),
        f"NF4_{_size}": partial(_scaled, partial(_levels, NF4)),
        f"FP4_{_size}": partial(_scaled, partial(_levels, FP4)),
        f"F8_{_size}": partial(_scaled, _float8),
    }
