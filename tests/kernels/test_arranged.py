"""Packed matrices in the form for tensor cores, against dequantized ones, also in the interpreter."""

import pytest
import torch

from tests.triton_here import DEVICE  # skips where there is no Triton

# isort: split
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.triton import arranged
from octavo.runtime.kernels.triton.table import cuda_table
from tests.kernel_cases import make_blocks

TYPES = ("Q4_0", "Q4_1", "Q4_K", "Q8_0", "U4_32", "U4_64", "S8_32", "F8_64", "MXFP4", "NV4_64")
CASES = [(name, rows, 70, 1024) for name in TYPES for rows in (1, 9)]
CASES += [("Q4_0", 64, 130, 2048), ("S8_64", 33, 65, 256), ("Q4_K", 70, 64, 256)]
LINEAR = cuda_table().linear


def products(name, rows, n, k):
    """The product of an arranged matrix, what it should be, and both forms of the matrix."""
    torch.manual_seed(rows)
    packed = Packed(make_blocks(name, n, k), name)
    x = torch.randn(rows, k + 4)[:, :k].bfloat16()
    bias = torch.randn(n).bfloat16()
    made = LINEAR.arrange(packed._replace(blocks=packed.blocks.to(DEVICE)), torch.bfloat16)
    wide = torch.zeros(rows, n + 3, device=DEVICE, dtype=torch.bfloat16)
    out = LINEAR.block_matmul(x.to(DEVICE), made, bias.to(DEVICE), wide[:, 2 : n + 2])
    exact = ref_table().linear.block_dequantize(packed)
    assert not wide[:, :2].any() and not wide[:, n + 2 :].any()
    return out.float().cpu(), x.float() @ exact.t() + bias.float(), made, exact


def off(made, expected):
    return float((made - expected).norm() / expected.norm())


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("name", "rows", "n", "k"), CASES)
def test_products(name, rows, n, k):
    """Within the roundings of bfloat16; with the inputs of other columns, far from it."""
    made, expected, matrix, exact = products(name, rows, n, k)
    assert off(made, expected) < 0.01
    assert off(made, expected.roll(1, 1)) > 0.1
    assert off(LINEAR.block_dequantize(matrix).cpu(), exact) < 0.01


def test_rows_are_looked_up():
    packed = Packed(make_blocks("Q4_K", 9, 512).to(DEVICE), "Q4_K")
    places = torch.tensor([3, 0, 8, 3], device=DEVICE)
    rows = LINEAR.block_dequantize(LINEAR.arrange(packed, torch.bfloat16), places, 2.0)
    assert off(rows, 2 * ref_table().linear.block_dequantize(packed)[places]) < 0.01


@pytest.mark.parametrize(("splits", "tile_n"), [(1, 32), (3, 64)])
def test_parts(monkeypatch, splits, tile_n):
    """Of inputs that they do not divide."""
    tiles = arranged.tiles
    other = {"SPLIT": splits, "TILE_N": tile_n}
    monkeypatch.setattr(arranged, "tiles", lambda *shape: tiles(*shape) | other)
    made, expected, *_ = products("U4_32", 3, 70, 1280)
    assert off(made, expected) < 0.01


@pytest.mark.parametrize(
    ("name", "k", "dtype"),
    [("Q4_0", 1024, torch.float32), ("Q4_0", 96, torch.bfloat16), ("Q6_K", 256, torch.bfloat16)],
)
def test_what_stays_as_it_is(name, k, dtype):
    packed = Packed(make_blocks(name, 3, k), name)
    assert LINEAR.arrange(packed, dtype) is packed
