"""Codes are unpacked from words here, for forms: streams of bits, low ones first, and AWQ's order."""

import torch
from torch import Tensor

_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Where in a word AWQ keeps columns 0 to 7."""


def unpack_rows(words: Tensor, bits: int, size: int) -> Tensor:
    """Return the first `size` codes of each row's stream: [rows, words] int32 to [rows, size] uint8."""
    raw = words.contiguous().view(torch.uint8)
    if bits == 8:
        codes = raw
    elif bits == 3:
        threes = raw.view(len(raw), -1, 3).int()
        stream = threes[..., 0] | threes[..., 1] << 8 | threes[..., 2] << 16
        codes = torch.stack([(stream >> 3 * i & 7).to(torch.uint8) for i in range(8)], -1).flatten(-2)
    else:
        mask = (1 << bits) - 1
        parts = [raw >> shift & mask for shift in range(0, 8, bits)]
        codes = torch.stack(parts, -1).flatten(-2)
    return codes[..., :size]


def unpack_awq(words: Tensor) -> Tensor:
    """Return the codes of 4 bits of AWQ's words: [rows, words] int32 to [rows, 8 words] uint8."""
    codes = unpack_rows(words, 4, 8 * words.shape[-1])
    return codes.view(len(codes), -1, 8)[..., _AWQ_ORDER].flatten(-2)
