"""Weights in groups are packed exactly, or refused."""

import pytest
import torch

from octavo.base.errors import BadCheckpoint
from octavo.runtime.quantization.grouped import Grouped, pack

SCALE = torch.tensor([[0.1]])
"""float16 does not hold it, so codes become signed bytes."""


def of_bytes(code: int, zero: int) -> Grouped:
    codes = torch.full((1, 32), code - 128, dtype=torch.int8)
    zeros = torch.tensor([[zero - 128.0]])
    return Grouped("U8", codes, SCALE, zeros, torch.zeros(32, dtype=torch.int64))


@pytest.mark.parametrize(("code", "zero"), [(255, 0), (0, 255)])
def test_a_byte_that_its_zero_point_moves_out_of_range_is_refused(code, zero):
    with pytest.raises(BadCheckpoint, match="zero points"):
        pack(of_bytes(code, zero))


@pytest.mark.parametrize(("code", "value"), [(255, 127), (0, -128), (128, 0)])
def test_bytes_about_the_middle_are_kept(code, value):
    blocks, _ = pack(of_bytes(code, 128))
    assert blocks.data[0, -32:].view(torch.int8).tolist() == [value] * 32


@pytest.mark.parametrize(("dead", "kind"), [(1e-7, "U4_32"), (1e-5, "U4_32"), (1e-3, "S8_32")])
def test_a_dead_group_costs_no_memory(dead, kind):
    """Its scale loses digits, which weights beside it hide; not so those of a group that counts."""
    scales = torch.tensor([[2**-7, dead]])
    codes = torch.arange(64, dtype=torch.uint8).view(1, 64) % 16
    blocks, _ = pack(Grouped("U4", codes, scales, None, torch.arange(64) // 32))
    assert blocks.type.name == kind
