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
