"""Products in bfloat16: on AMX where there is one; on any CPU the same kernel over tiles in plain code."""

import ctypes
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from octavo.base import env
from octavo.runtime.kernels import build
from octavo.runtime.kernels.cpu.library import Library
from octavo.runtime.kernels.cpu.table import cpu_table, table_of
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import BFLOAT16_TYPES, KernelTable
from tests.kernel_cases import BLOCKS, make_blocks

REF = ref_table()
NAMES = sorted(BFLOAT16_TYPES)
_C_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int}


@pytest.fixture(scope="module")
def soft(tmp_path_factory: pytest.TempPathFactory) -> dict[int, KernelTable]:
    """By number of threads: the kernels with tiles in plain code, linked to the library for all else."""
    if env.kernels_disabled():
        pytest.skip("OCTAVO_NO_CPU_KERNELS is set")
    path = build.shared_library()
    assert path is not None
    made = tmp_path_factory.mktemp("soft") / "soft.so"
    source = Path(build.__file__).parent / "cpu" / "matmul_bf16.cpp"
    options = [*build._OPTIONS, "-march=native", "-DOCTAVO_SOFT_TILES", "-shared"]
    subprocess.run([*shlex.split(env.compiler()), *options, source, path, "-o", made], check=True)
    function = ctypes.CDLL(str(made)).octavo_matmul_bf16
    function.argtypes, function.restype = [_C_TYPES[letter] for letter in "plllpllippli"], None
    library = Library(path)
    library.octavo_matmul_bf16, library.has_tiles = function, True
    return {threads: table_of(library, threads) for threads in (1, 2)}


@pytest.mark.parametrize("name", NAMES)
def test_tiles_against_the_twin(soft: dict[int, KernelTable], name: str) -> None:
    """Rows that fill tiles and not, outputs that fill panels and not, several pieces of a row, a bias."""
    torch.manual_seed(0)
    for m, n, k in ((1, 37, 512), (5, 7, 256), (33, 70, 1280), (49, 33, 256)):
        x, blocks, bias = torch.randn(m, k + 5)[:, :k], make_blocks(name, n, k), torch.randn(n)
        weights = REF.block_dequantize(blocks, name).bfloat16().double()
        rounded = x.bfloat16().double()
        error = soft[1].block_matmul(x, blocks, name, bias, "bfloat16") - (rounded @ weights.T + bias)
        assert (error.abs() <= 2e-6 * (rounded.abs() @ weights.abs().T + bias.abs())).all(), (m, n, k)


@pytest.mark.parametrize("name", ["BF16", "Q4_1", "Q6_K"])
def test_rows_threads_and_places_change_no_bit(soft: dict[int, KernelTable], name: str) -> None:
    torch.manual_seed(1)
    blocks, x = make_blocks(name, 101, 512), torch.randn(70, 512)
    whole = soft[1].block_matmul(x, blocks, name, None, "bfloat16")
    for start, end in ((0, 1), (69, 70), (3, 5), (7, 24), (0, 33), (13, 70)):
        for table in soft.values():
            part = table.block_matmul(x[start:end], blocks, name, None, "bfloat16")
            assert torch.equal(part, whole[start:end]), (start, end)
    wide = torch.zeros(70, 110)
    soft[2].block_matmul(x, blocks[5:50], name, None, "bfloat16", wide[:, 4:49])
    assert torch.equal(wide[:, 4:49], whole[:, 5:50])
    assert not wide[:, :4].any() and not wide[:, 49:].any()


def test_rows_too_many_for_the_cache(soft: dict[int, KernelTable]) -> None:
    """x is cut into chunks; tiles count one by one beyond the first."""
    torch.manual_seed(2)
    blocks, x = make_blocks("Q8_0", 40, 4096), torch.randn(16 * 8 + 3, 4096)
    whole = soft[2].block_matmul(x, blocks, "Q8_0", None, "bfloat16")
    assert torch.equal(soft[1].block_matmul(x[130:], blocks, "Q8_0", None, "bfloat16"), whole[130:])
    expected = REF.block_matmul(x, blocks, "Q8_0", None, "bfloat16")
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_row_may_end_anywhere(soft: dict[int, KernelTable]) -> None:
    for m in (1, 5):
        x, blocks = torch.randn(m, 75), make_blocks("BF16", 11, 75)
        expected = REF.block_matmul(x, blocks, "BF16", None, "bfloat16")
        actual = soft[1].block_matmul(x, blocks, "BF16", None, "bfloat16")
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_tiles_of_this_cpu(fast: KernelTable, soft: dict[int, KernelTable], name: str) -> None:
    """AMX gives what plain code gives, bit by bit; without one nothing is rounded."""
    torch.manual_seed(3)
    for m in (1, 16, 37):
        x, blocks, bias = torch.randn(m, 768), make_blocks(name, 75, 768), torch.randn(75)
        table, how = (soft[1], "bfloat16") if fast.activations == "bfloat16" else (fast, "float32")
        expected = table.block_matmul(x, blocks, name, bias, how)
        assert torch.equal(fast.block_matmul(x, blocks, name, bias, "bfloat16"), expected)


@pytest.mark.parametrize("name", sorted(set(BLOCKS) - BFLOAT16_TYPES))
def test_more_exact_types_stay_in_float32(fast: KernelTable, name: str) -> None:
    x, blocks = torch.randn(3, 64), make_blocks(name, 5, 64)
    assert torch.equal(
        fast.block_matmul(x, blocks, name, None, "bfloat16"), fast.block_matmul(x, blocks, name)
    )


def test_not_a_number_stays_in_its_row(soft: dict[int, KernelTable]) -> None:
    blocks, x = make_blocks("Q4_1", 5, 64), torch.zeros(3, 64)
    x[1, 40] = float("nan")
    out = soft[1].block_matmul(x, blocks, "Q4_1", None, "bfloat16")
    assert torch.equal(out[::2], torch.zeros(2, 5)) and out[1].isnan().all()
    assert cpu_table(1).block_matmul(x, blocks, "Q4_1", None, "bfloat16")[1].isnan().all()
