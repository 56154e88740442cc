"""A token's result depends on the token alone: the same bits in every batch, chunk and number of threads."""

import pytest
import torch

from octavo.runtime.kernels.attention import Scores
from octavo.runtime.kernels.cpu.table import cpu_table
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.kernels.table import KernelTable
from tests.kernel_cases import CACHE_DTYPES, TYPE_NAMES, make_blocks, make_paged

pytestmark = pytest.mark.matrix(5)


@pytest.mark.parametrize("input_precision", ["float32", "bfloat16", "int16", "int8"])
@pytest.mark.parametrize("name", TYPE_NAMES)
def test_matmul_rows_do_not_see_each_other(
    fast: KernelTable, name: str, input_precision: InputPrecision
) -> None:
    torch.manual_seed(2)
    blocks, x = make_blocks(name, 101, 512), torch.randn(70, 512)
    whole = cpu_table(1).linear.block_matmul(x, Packed(blocks, name, input_precision))
    for start, end in ((0, 1), (69, 70), (3, 5), (1, 4), (7, 24), (0, 70), (13, 70)):
        part = fast.linear.block_matmul(x[start:end], Packed(blocks, name, input_precision))
        assert torch.equal(part, whole[start:end]), (start, end)


@pytest.mark.parametrize("input_precision", ["float32", "bfloat16", "int16", "int8"])
@pytest.mark.parametrize("name", TYPE_NAMES)
def test_matmul_columns_do_not_see_each_other(
    fast: KernelTable, name: str, input_precision: InputPrecision
) -> None:
    torch.manual_seed(2)
    blocks, x = make_blocks(name, 101, 512), torch.randn(9, 512)
    whole = fast.linear.block_matmul(x, Packed(blocks, name, input_precision))
    for start, end in ((0, 1), (5, 30), (100, 101)):  # a tensor-parallel rank's part, or q, k, v apart
        part = blocks[start:end]
        assert torch.equal(
            fast.linear.block_matmul(x, Packed(part, name, input_precision)), whole[:, start:end]
        )
        assert torch.equal(
            fast.linear.block_matmul(x[:1], Packed(part, name, input_precision)), whole[:1, start:end]
        )


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("window", [0, 50])
def test_attention_ignores_chunks_and_neighbours(fast: KernelTable, dtype: torch.dtype, window: int) -> None:
    lens = [(150, 150), (1, 77), (20, 95)]
    paged = make_paged(lens, heads=6, kv_heads=2, head_dim=48, block_size=16, dtype=dtype, window=window)
    scores = Scores(0.15, window)
    whole = cpu_table(1).attention.paged_attention(*paged.args(), scores)
    for chunk in (1, 7, 64):
        assert torch.equal(fast.attention.paged_attention(*paged.in_chunks(chunk), scores), whole), chunk


def test_block_size_and_place_do_not_matter(fast: KernelTable) -> None:
    outputs = []
    for block_size in (4, 16, 64):
        paged = make_paged([(20, 90), (1, 33)], heads=4, kv_heads=2, head_dim=64, block_size=block_size)
        keys = torch.randn((2, 90, 2, 2, 64), generator=torch.Generator().manual_seed(5))
        for r, kv_len in enumerate(paged.kv_lens.tolist()):
            for position in range(kv_len):
                block = paged.block_tables[r, position // block_size]
                paged.cache[block, :, position % block_size] = keys[r, position]
        q = torch.randn(paged.q.shape, generator=torch.Generator().manual_seed(6))
        outputs.append(fast.attention.paged_attention(q, *paged.args()[1:], Scores(0.1)))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_not_a_number_stays_with_its_request(fast: KernelTable) -> None:
    paged = make_paged([(4, 40), (3, 50)], heads=4, kv_heads=2, head_dim=32, block_size=16)
    clean = fast.attention.paged_attention(*paged.args(), Scores(0.1))
    paged.cache[paged.block_tables[1, 0], :, 3] = float("nan")
    out = fast.attention.paged_attention(*paged.args(), Scores(0.1))
    assert torch.equal(out[:4], clean[:4])
    assert out[4:].isnan().all()
