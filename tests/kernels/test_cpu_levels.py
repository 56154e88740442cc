"""Every instruction set that this CPU can run: right, and the same bits in any batch.

Compiles the kernels for each, so it runs with --whole alone;
tests/kernels/test_fast_against_ref.py has the best for this CPU.
"""

import shlex
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from octavo.base import env
from octavo.base.errors import ConfigError
from octavo.runtime.kernels import build, variants
from octavo.runtime.kernels.cpu.library import Library, Products
from octavo.runtime.kernels.cpu.proof import disagreements
from octavo.runtime.kernels.cpu.table import table_of
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable
from tests.kernel_cases import make_blocks
from tests.shared_objects import share_objects

pytestmark = pytest.mark.slow

_HERE = [name for name, level in variants.VARIANTS.items() if level.runs_on(build.cpu_features())]
_PRODUCTS = {"amx": Products.TILES, "avx512_bf16": Products.DOTS, "bf16": Products.DOTS}
_LONG_VECTORS = {"amx", "avx512_bf16", "avx512"}


@pytest.fixture(scope="module", params=_HERE)
def level(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[int, KernelTable]]:
    """The level's name, and its kernels by number of threads."""
    path = tmp_path_factory.mktemp(request.param) / "library.so"
    options = variants.VARIANTS[request.param].options
    with pytest.MonkeyPatch.context() as patch:
        share_objects(patch, tmp_path_factory)
        build._make([*shlex.split(env.compiler()), *build._OPTIONS, *options], path)
    library = Library(path)
    assert library.bfloat16_products == _PRODUCTS.get(request.param, Products.NONE)
    return request.param, {threads: table_of(library, threads) for threads in (1, 2)}


def test_a_level_proves_right(level: tuple[str, dict[int, KernelTable]]) -> None:
    assert not list(disagreements(level[1][1], ref_table()))


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int16", "int8"])
@pytest.mark.parametrize("name", ["BF16", "Q4_0", "Q4_1", "Q6_K", "Q8_0"])
def test_rows_threads_and_places_change_no_bit(
    level: tuple[str, dict[int, KernelTable]], name: str, precision: InputPrecision
) -> None:
    torch.manual_seed(1)
    blocks, x = make_blocks(name, 101, 768), torch.randn(70, 768)
    matrix, below = (Packed(part, name, precision) for part in (blocks, blocks[37:].contiguous()))
    whole = level[1][1].linear.block_matmul(x, matrix)
    assert not torch.equal(whole[:1], whole[1:2])
    for start, end in ((0, 1), (69, 70), (3, 5), (7, 24), (13, 70)):
        for table in level[1].values():
            assert torch.equal(table.linear.block_matmul(x[start:end], matrix), whole[start:end])
            assert torch.equal(table.linear.block_matmul(x[start:end], below), whole[start:end, 37:])


@pytest.mark.parametrize("precision", ["int16", "int8"])
def test_threads_share_the_rows_of_a_prompt(
    level: tuple[str, dict[int, KernelTable]], precision: InputPrecision
) -> None:
    torch.manual_seed(4)
    x, matrix = torch.randn(600, 512), Packed(make_blocks("Q4_1", 24, 512), "Q4_1", precision)
    whole = level[1][2].linear.block_matmul(x, matrix)
    for start, end in ((0, 1), (255, 257), (290, 310), (511, 600)):
        assert torch.equal(level[1][1].linear.block_matmul(x[start:end], matrix), whole[start:end])


@pytest.mark.parametrize("rows", [1, 3, 40, 300])
@pytest.mark.parametrize(
    ("name", "precision", "levels"), [("Q4_1", "bfloat16", _PRODUCTS), ("BF16", "float32", _LONG_VECTORS)]
)
def test_gated_is_product_and_gate(
    level: tuple[str, dict[int, KernelTable]],
    name: str,
    precision: InputPrecision,
    levels: Collection[str],
    rows: int,
) -> None:
    torch.manual_seed(2)
    kernels, x = level[1][2], torch.randn(rows, 512)
    matrix = Packed(make_blocks(name, 2 * 37, 512), name, precision)
    gated = kernels.linear.gated_block_matmul
    made = gated and gated(x, matrix, "silu")
    assert (made is not None) == (level[0] in levels)
    if made is not None:
        product = kernels.linear.block_matmul(x, matrix)
        assert torch.equal(made, kernels.activate(product, "silu", gated=True))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("k", [75, 193, 512])
def test_rows_of_floats_are_the_same_in_any_company(
    level: tuple[str, dict[int, KernelTable]], name: str, k: int
) -> None:
    """A prompt's rows are shared by threads, and meet weights block by block."""
    torch.manual_seed(6)
    x, bias, matrix = torch.randn(500, k), torch.randn(45), Packed(make_blocks(name, 45, k), name)
    whole = level[1][2].linear.block_matmul(x, matrix, bias)
    expected = ref_table().linear.block_matmul(x, matrix, bias)
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-4)
    for start, end in ((0, 1), (13, 15), (200, 230), (490, 500)):
        assert torch.equal(level[1][1].linear.block_matmul(x[start:end], matrix, bias), whole[start:end])


def test_floats_are_rounded_where_that_is_faster(level: tuple[str, dict[int, KernelTable]]) -> None:
    """Intel's vectors multiply floats faster than bfloat16; its tiles, and other CPUs' vectors, do not."""
    is_slower = level[0] == "avx512_bf16" and "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    rounds = level[0] in _PRODUCTS and not is_slower
    assert level[1][1].linear.dense_precision == ("bfloat16" if rounds else "float32")


def test_a_row_may_end_anywhere(level: tuple[str, dict[int, KernelTable]]) -> None:
    torch.manual_seed(3)
    for rows in (1, 5):
        x, matrix = torch.randn(rows, 75), Packed(make_blocks("BF16", 11, 75), "BF16", "bfloat16")
        expected = ref_table().linear.block_matmul(x, matrix)
        torch.testing.assert_close(level[1][1].linear.block_matmul(x, matrix), expected, rtol=2e-2, atol=2e-2)


def test_a_lower_level_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    features = variants.VARIANTS["avx512_bf16"].features
    monkeypatch.setattr(build, "cpu_features", lambda: features)
    monkeypatch.delenv("OCTAVO_CPU_ISA", raising=False)
    assert build.chosen_level()[0] == "avx512_bf16"
    monkeypatch.setenv("OCTAVO_CPU_ISA", "avx2")
    assert build.chosen_level()[0] == "avx2" and build._marches() == [("-march=x86-64-v3",)]
    monkeypatch.setenv("OCTAVO_CPU_ISA", "amx")
    with pytest.raises(ConfigError, match="does not have"):
        build.chosen_level()
    monkeypatch.setenv("OCTAVO_CPU_ISA", "sse")
    with pytest.raises(ConfigError, match="may be amx, avx512_bf16, avx512, avx2"):
        build.chosen_level()


def test_levels_have_libraries_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CPU_ISA", raising=False)
    names = {build._prefix()}
    for name in _HERE:
        monkeypatch.setenv("OCTAVO_CPU_ISA", name)
        names.add(build._prefix())
    assert len(names) == 1 + len(_HERE)
