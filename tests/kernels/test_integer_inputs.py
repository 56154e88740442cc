"""Products of integers: exact for activations that are whole in their bits, close for all others."""

from typing import Literal

import pytest
import torch

from octavo.runtime.kernels.block_types import INTEGER_TYPES
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable
from tests.kernel_cases import BLOCKS, GROUP_NAMES, make_blocks

pytestmark = pytest.mark.matrix(5)

REF = ref_table()
NAMES = sorted(INTEGER_TYPES)
LARGEST = {"int8": 127, "int16": 32767}

Kind = Literal["int8", "int16"]
KINDS: tuple[Kind, ...] = ("int8", "int16")


def whole_numbers(rows: int, columns: int, largest: int) -> torch.Tensor:
    """Activations that rounding leaves as they are: integers up to `largest`, which every block of 32 has."""
    x = torch.randint(-largest, largest + 1, (rows, columns)).float()
    x[:, ::32] = largest
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [1, 3, 8, 21])
def test_whole_activations_lose_nothing(fast: KernelTable, name: str, m: int, kind: Kind) -> None:
    torch.manual_seed(m)
    x, bias, blocks = whole_numbers(m, 768, LARGEST[kind]), torch.randn(37), make_blocks(name, 37, 768)
    expected = (
        x.double() @ REF.linear.block_dequantize(Packed(blocks, name)).double().T + bias.double()
    ).float()
    actual = fast.linear.block_matmul(x, Packed(blocks, name, kind), bias)
    torch.testing.assert_close(actual, expected, rtol=0, atol=3e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_rounding_is_the_twins(fast: KernelTable, name: str, kind: Kind) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 1029)[:, 3:1027] * torch.logspace(-6, 6, 16)[:, None]
    blocks = make_blocks(name, 64, 1024)
    scale = x.abs() @ REF.linear.block_dequantize(Packed(blocks, name)).abs().T
    expected = REF.linear.block_matmul(x, Packed(blocks, name, kind))
    assert ((fast.linear.block_matmul(x, Packed(blocks, name, kind)) - expected).abs() <= 1e-6 * scale).all()
    error = (expected - REF.linear.block_matmul(x, Packed(blocks, name))).abs() / scale
    assert 0.05 < error.max() * LARGEST[kind] < 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [1, 7])
def test_the_largest_numbers_do_not_overflow(fast: KernelTable, name: str, m: int, kind: Kind) -> None:
    """All bits of every weight set, or none, against both ends of what activations may be."""
    torch.manual_seed(m)
    blocks = make_blocks(name, 24, 512).view(24, -1, BLOCKS[name].num_bytes)
    places = {"Q8_0": (2, 34), "Q6_K": (0, 192), "Q4_K": (16, 144), "Q5_K": (16, 176), "MXFP4": (1, 17)}
    first = 4 if name.endswith("1") or name in GROUP_NAMES else 2
    first, last = places.get(name, (first, BLOCKS[name].num_bytes))
    blocks[:12, :, first:last], blocks[12:, :, first:last] = 255, 0
    if name[:2] in ("Q8", "S8", "U8"):
        blocks[:6, :, first:last], blocks[6:12, :, first:last] = 128, 127
    x = LARGEST[kind] * (torch.randint(0, 2, (m, 1)) * 2.0 - 1) * torch.ones(m, 512)
    packed = blocks.view(24, -1)
    expected = (x.double() @ REF.linear.block_dequantize(Packed(packed, name)).double().T).float()
    actual = fast.linear.block_matmul(x, Packed(packed, name, kind))
    torch.testing.assert_close(actual, expected, rtol=3e-6, atol=3e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("parts", [1, 3, 5, 6])
def test_rows_of_few_parts(fast: KernelTable, name: str, parts: int, kind: Kind) -> None:
    """Parts are rounded several at a time, each by its own largest number."""
    torch.manual_seed(parts)
    x = whole_numbers(5, 32 * parts, LARGEST[kind]) * 2.0 ** torch.arange(parts).repeat_interleave(32)
    blocks = make_blocks(name, 37, 32 * parts)
    expected = (x.double() @ REF.linear.block_dequantize(Packed(blocks, name)).double().T).float()
    actual = fast.linear.block_matmul(x, Packed(blocks, name, kind))
    torch.testing.assert_close(actual, expected, rtol=0, atol=3e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("name", sorted(set(BLOCKS) - INTEGER_TYPES))
def test_other_types_stay_in_float32(fast: KernelTable, name: str) -> None:
    x, blocks = torch.randn(3, 64), make_blocks(name, 5, 64)
    exact = fast.linear.block_matmul(x, Packed(blocks, name))
    assert all(torch.equal(fast.linear.block_matmul(x, Packed(blocks, name, kind)), exact) for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_not_a_number(fast: KernelTable, kind: Kind) -> None:
    blocks = make_blocks("Q4_1", 5, 64)
    x = torch.zeros(4, 64)
    x[1, 40], x[2, 3], x[3, 5] = float("nan"), float("inf"), 1e-43
    out = fast.linear.block_matmul(x, Packed(blocks, "Q4_1", kind))
    assert torch.equal(out[0], torch.zeros(5))
    assert out[1:3].isnan().all()
    assert (out[3].abs() < 1e-38).all()
