"""The integer matmul: exact for activations that are whole in 8 bits, close for all others."""

import pytest
import torch

from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import INT8_TYPES, KernelTable
from tests.kernel_cases import BLOCKS, make_blocks

REF = ref_table()


def whole_numbers(rows: int, columns: int) -> torch.Tensor:
    """Activations that rounding leaves as they are: integers up to 127, with 127 in every block of 32."""
    x = torch.randint(-127, 128, (rows, columns)).float()
    x[:, ::32] = 127.0
    return x


@pytest.mark.parametrize("name", sorted(INT8_TYPES))
@pytest.mark.parametrize("m", [1, 3, 8, 21])
def test_whole_activations_lose_nothing(fast: KernelTable, name: str, m: int) -> None:
    torch.manual_seed(m)
    x, bias, blocks = whole_numbers(m, 768), torch.randn(37), make_blocks(name, 37, 768)
    expected = (x.double() @ REF.block_dequantize(blocks, name).double().T + bias.double()).float()
    actual = fast.block_matmul(x, blocks, name, bias, "int8")
    torch.testing.assert_close(actual, expected, rtol=0, atol=3e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("name", sorted(INT8_TYPES))
def test_rounding_costs_less_than_a_percent(fast: KernelTable, name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 1025)[:, :1024]
    blocks = make_blocks(name, 64, 1024)
    expected = REF.block_matmul(x, blocks, name)
    error = fast.block_matmul(x, blocks, name, None, "int8") - expected
    assert error.norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("name", sorted(INT8_TYPES))
@pytest.mark.parametrize("m", [1, 7])
def test_the_largest_numbers_do_not_overflow(fast: KernelTable, name: str, m: int) -> None:
    """All bits of every weight set, or none, against 127 and -127: the ends of what 16 bits hold."""
    torch.manual_seed(m)
    blocks = make_blocks(name, 24, 512).view(24, -1, BLOCKS[name].num_bytes)
    first, last = {"Q8_0": (2, 34), "Q6_K": (0, 192), "Q4_K": (16, 144), "Q5_K": (16, 176)}.get(
        name, (4 if name.endswith("1") else 2, BLOCKS[name].num_bytes)
    )
    blocks[:12, :, first:last], blocks[12:, :, first:last] = 255, 0
    if name == "Q8_0":
        blocks[:6, :, first:last], blocks[6:12, :, first:last] = 128, 127
    x = 127.0 * (torch.randint(0, 2, (m, 1)) * 2 - 1) * torch.ones(m, 512)
    packed = blocks.view(24, -1)
    expected = (x.double() @ REF.block_dequantize(packed, name).double().T).float()
    actual = fast.block_matmul(x, packed, name, None, "int8")
    torch.testing.assert_close(actual, expected, rtol=3e-6, atol=3e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("name", sorted(set(BLOCKS) - INT8_TYPES))
def test_other_types_stay_in_float32(fast: KernelTable, name: str) -> None:
    x, blocks = torch.randn(3, 64), make_blocks(name, 5, 64)
    assert torch.equal(fast.block_matmul(x, blocks, name, None, "int8"), fast.block_matmul(x, blocks, name))


def test_zeros_and_not_a_number(fast: KernelTable) -> None:
    blocks = make_blocks("Q4_1", 5, 64)
    x = torch.zeros(3, 64)
    x[1, 40] = float("nan")
    x[2, 3] = float("inf")
    out = fast.block_matmul(x, blocks, "Q4_1", None, "int8")
    assert torch.equal(out[0], torch.zeros(5))
    assert out[1:].isnan().all()
