"""Products in bfloat16: on AMX where there is one; on any CPU the same kernel over tiles in plain code."""

import ctypes
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.base import env
from octavo.runtime.kernels import build
from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.block_types import BFLOAT16_TYPES
from octavo.runtime.kernels.cpu.library import Library, Products
from octavo.runtime.kernels.cpu.table import cpu_table, table_of
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable
from tests.kernel_cases import BLOCKS, make_blocks

pytestmark = pytest.mark.matrix(8)

REF = ref_table()
NAMES = sorted(BFLOAT16_TYPES)
_FUNCTIONS = {
    "octavo_matmul_bf16": "plllpllippli",
    "octavo_gated_matmul_bf16": "plllplliipi",
    "octavo_feed_forward_bf16": "plllplliipllipi",
    "octavo_greedy_matmul_bf16": "plllpllippi",
    "octavo_activated_matmul_bf16": "plllpllipipi",
}
"""With letters as in cpu/exported.h."""
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
    library = Library(path)  # before the soft one, whose functions it would find
    soft_library = ctypes.CDLL(str(made))
    for name, letters in _FUNCTIONS.items():
        function = soft_library[name]
        function.argtypes, function.restype = [_C_TYPES[letter] for letter in letters], None
        setattr(library, name, function)
    library.bfloat16_products = Products.TILES
    return {threads: table_of(library, threads) for threads in (1, 2)}


@pytest.mark.parametrize("name", NAMES)
def test_tiles_against_the_twin(soft: dict[int, KernelTable], name: str) -> None:
    """Rows that fill tiles and not, outputs that fill panels and not, several pieces of a row, a bias."""
    torch.manual_seed(0)
    for m, n, k in ((1, 37, 512), (5, 7, 256), (33, 70, 1280), (49, 33, 256)):
        x, blocks, bias = torch.randn(m, k + 5)[:, :k], make_blocks(name, n, k), torch.randn(n)
        weights = REF.linear.block_dequantize(Packed(blocks, name)).bfloat16().double()
        rounded = x.bfloat16().double()
        error = soft[1].linear.block_matmul(x, Packed(blocks, name, "bfloat16"), bias) - (
            rounded @ weights.T + bias
        )
        assert (error.abs() <= 2e-6 * (rounded.abs() @ weights.abs().T + bias.abs())).all(), (m, n, k)


def test_floats_are_sums_of_two(soft: dict[int, KernelTable]) -> None:
    """As exact as 16 bits are, far more than 8; an activation on the way changes no bit of what it gives."""
    torch.manual_seed(0)
    for m, n, k in ((1, 37, 512), (5, 7, 256), (33, 70, 1280), (49, 33, 250), (260, 40, 96)):
        x, blocks, bias = torch.randn(m, k + 5)[:, :k], make_blocks("F32", n, k), torch.randn(n)
        matrix, weights = Packed(blocks, "F32", "bfloat16"), blocks.view(torch.float32).double()
        found, wanted = soft[2].linear.block_matmul(x, matrix, bias), x.double() @ weights.T + bias
        scale = x.double().abs() @ weights.abs().T + bias.abs()
        assert ((found - wanted).abs() <= 1e-5 * scale).all(), (m, n, k)
        rounded = x.bfloat16().double() @ weights.bfloat16().double().T + bias
        assert ((rounded - wanted).abs() > 1e-4 * scale).any(), "the twin: one bfloat16 number"
        assert soft[1].linear.activated_block_matmul is not None
        made = soft[1].linear.activated_block_matmul(x, matrix, bias, "gelu")
        assert made is not None
        assert torch.equal(made, soft[1].activate(found, "gelu", gated=False))


@pytest.mark.parametrize("name", ["BF16", "F32", "Q4_0", "Q4_1", "Q6_K", "Q8_0"])
def test_rows_threads_and_places_change_no_bit(soft: dict[int, KernelTable], name: str) -> None:
    """Also where a single row needs no tiles, and where single strips meet 33 to 64 rows."""
    torch.manual_seed(1)
    blocks, x = make_blocks(name, 101, 512), torch.randn(70, 512)
    whole = soft[1].linear.block_matmul(x, Packed(blocks, name, "bfloat16"))
    for start, end in ((0, 1), (69, 70), (3, 5), (7, 24), (0, 33), (13, 70)):
        for table in soft.values():
            part = table.linear.block_matmul(x[start:end], Packed(blocks, name, "bfloat16"))
            assert torch.equal(part, whole[start:end]), (start, end)
    wide = torch.zeros(70, 110)
    soft[2].linear.block_matmul(x, Packed(blocks[5:50], name, "bfloat16"), None, wide[:, 4:49])
    assert torch.equal(wide[:, 4:49], whole[:, 5:50])
    assert not wide[:, :4].any() and not wide[:, 49:].any()


@pytest.mark.parametrize("k", [544, 2048])
def test_bfloat16_weights_are_multiplied_where_they_lie(soft: dict[int, KernelTable], k: int) -> None:
    """As those that are laid out for more rows, bit by bit; also the last outputs, and rows 4 KB apart."""
    torch.manual_seed(7)
    blocks, x = make_blocks("BF16", 2 * 49, k), torch.randn(520, k)
    whole = soft[2].linear.block_matmul(x, Packed(blocks, "BF16", "bfloat16"))
    gated = soft[1].activate(whole, "silu", gated=True)
    for m in (1, 33, 64, 65, 257) if k == 544 else (49,):
        for table in soft.values():
            assert torch.equal(
                table.linear.block_matmul(x[:m], Packed(blocks, "BF16", "bfloat16")), whole[:m]
            ), m
            both = _gated(table, x[:m], blocks, "BF16", "silu")
            assert both is not None and torch.equal(both, gated[:m]), m


@pytest.mark.parametrize(("name", "k"), [("Q8_0", 4096), ("Q4_1", 96), ("Q4_K", 256), ("BF16", 75)])
def test_many_rows_are_what_few_are(soft: dict[int, KernelTable], name: str, k: int) -> None:
    """The factors change places; panels are laid out by who multiplies them, and (of 4096 inputs) first."""
    torch.manual_seed(2)
    blocks, x, bias = make_blocks(name, 101, k), torch.randn(260, k), torch.randn(101)
    for added in (None, bias):
        whole = soft[2].linear.block_matmul(x, Packed(blocks, name, "bfloat16"), added)
        assert torch.equal(
            whole[200:], soft[1].linear.block_matmul(x[200:], Packed(blocks, name, "bfloat16"), added)
        )
        assert torch.equal(
            whole[:257], soft[1].linear.block_matmul(x[:257], Packed(blocks, name, "bfloat16"), added)
        )
    expected = REF.linear.block_matmul(x, Packed(blocks, name, "bfloat16"), bias)
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_large_matrices_are_laid_out_bit_by_bit(soft: dict[int, KernelTable]) -> None:
    """More than 4 MiB of panels."""
    torch.manual_seed(5)
    blocks, x = make_blocks("Q8_0", 530, 4096), torch.randn(97, 4096)
    whole = soft[2].linear.block_matmul(x, Packed(blocks, "Q8_0", "bfloat16"))
    few = [
        soft[2].linear.block_matmul(x[:64], Packed(part, "Q8_0", "bfloat16")) for part in blocks.split(265)
    ]
    assert torch.equal(whole[:64], torch.cat(few, 1))


@pytest.mark.parametrize(
    ("up_name", "down_name"), [("Q4_1", "Q4_1"), ("Q4_K", "Q6_K"), ("BF16", "Q8_0"), ("BF16", "BF16")]
)
def test_feed_forward_is_what_its_parts_are(
    soft: dict[int, KernelTable], up_name: str, down_name: str
) -> None:
    """A row that is left, and a pair of tiles; outputs that end inside a panel."""
    torch.manual_seed(6)
    up, down = make_blocks(up_name, 2 * 256, 256), make_blocks(down_name, 41, 256)
    wide = torch.randn(540, 261)
    gates: list[Activation] = ["silu", "gelu_tanh"]
    for gate, m in zip(gates, (70, 257) if down_name == "BF16" else (513, 540), strict=True):
        x = wide[:m, :256]
        inner = _gated(soft[1], x, up, up_name, gate)
        assert inner is not None
        expected = soft[1].linear.block_matmul(inner, Packed(down, down_name, "bfloat16"))
        for table in soft.values():
            made = _feed_forward(table, x, up, up_name, gate, down, down_name)
            assert made is not None and torch.equal(made, expected), (gate, m)


def test_feed_forward_is_for_many_rows_of_packed_weights(soft: dict[int, KernelTable]) -> None:
    up, down, x = make_blocks("Q4_1", 2 * 64, 64), make_blocks("Q4_1", 7, 64), torch.randn(520, 64)
    odd, short = make_blocks("BF16", 2 * 40, 64), make_blocks("BF16", 7, 40)
    lying, last = make_blocks("BF16", 2 * 64, 64), make_blocks("BF16", 7, 64)
    plain = make_blocks("F16", 7, 64)
    assert _feed_forward(soft[1], x, up, "Q4_1", "silu", down, "Q4_1") is not None
    assert _feed_forward(soft[1], x[:512], up, "Q4_1", "silu", down, "Q4_1") is None
    assert _feed_forward(soft[1], x[:65], lying, "BF16", "silu", last, "BF16") is not None
    assert _feed_forward(soft[1], x[:64], lying, "BF16", "silu", last, "BF16") is None
    assert _feed_forward(soft[1], x, up, "Q4_1", "silu", down, "Q4_1", "float32") is None
    assert _feed_forward(soft[1], x, odd, "BF16", "silu", short, "BF16") is None
    assert _feed_forward(soft[1], x, up, "Q4_1", "silu", plain, "F16") is None


def _feed_forward(
    table: KernelTable,
    x: Tensor,
    up: Tensor,
    up_name: str,
    gate: Activation,
    down: Tensor,
    down_name: str,
    how: InputPrecision = "bfloat16",
) -> Tensor | None:
    assert table.linear.block_feed_forward is not None
    return table.linear.block_feed_forward(x, Packed(up, up_name, how), gate, Packed(down, down_name, how))


@pytest.mark.parametrize("name", ["BF16", "Q4_1", "Q6_K"])
def test_gated_is_product_and_gate(soft: dict[int, KernelTable], name: str) -> None:
    torch.manual_seed(4)
    blocks, x = make_blocks(name, 2 * 37, 256), torch.randn(260, 256)
    both = soft[1].linear.block_matmul(x, Packed(blocks, name, "bfloat16"))
    gates: list[Activation] = ["silu", "gelu", "gelu_tanh"]
    for gate in gates:
        expected = soft[1].activate(both, gate, gated=True)
        for start, end in ((0, 1), (7, 24), (3, 44), (0, 260)):
            made = _gated(soft[2], x[start:end], blocks, name, gate)
            assert made is not None and torch.equal(made, expected[start:end]), (gate, start, end)
    if name != "BF16":  # floats have a kernel of their own where vectors are long
        assert _gated(soft[1], x, blocks, name, "silu", "float32") is None


def _gated(
    table: KernelTable,
    x: Tensor,
    blocks: Tensor,
    name: str,
    gate: Activation,
    how: InputPrecision = "bfloat16",
) -> Tensor | None:
    assert table.linear.gated_block_matmul is not None
    return table.linear.gated_block_matmul(x, Packed(blocks, name, how), gate)


@pytest.mark.parametrize("name", ["BF16", "Q4_K", "Q8_0"])
def test_greedy_is_product_and_choice(soft: dict[int, KernelTable], name: str) -> None:
    """Of equal ones the first, wherever tasks and strips end; rows that are no numbers."""
    torch.manual_seed(8)
    for n in (1, 37, 960):
        blocks, x = make_blocks(name, n, 256), torch.randn(64, 256)
        blocks[n // 2 :] = blocks[: n - n // 2].clone()  # every output twice, or nearly
        x[3, 5], x[40, 255] = float("nan"), float("nan")
        expected = soft[1].sampling.choose(soft[1].linear.block_matmul(x, Packed(blocks, name, "bfloat16")))
        for table in soft.values():
            for start, end in ((0, 1), (3, 4), (7, 24), (0, 33), (15, 64), (0, 64)):
                made = _greedy(table, x[start:end], blocks, name)
                assert made is not None and torch.equal(made[0], expected[0][start:end]), (n, start, end)
                torch.testing.assert_close(made[1], expected[1][start:end], rtol=0, atol=0, equal_nan=True)


def test_greedy_of_nothing_but_infinities(soft: dict[int, KernelTable]) -> None:
    """All alike: the first. One that is larger: that."""
    blocks, x = torch.zeros(70, 128, dtype=torch.uint8), torch.ones(2, 64)
    weights = blocks.view(torch.bfloat16)
    weights[:, 0] = float("-inf")
    for largest, value in ((0, float("-inf")), (69, float("inf"))):
        weights[largest, 0] = value
        for rows in (1, 2):
            made = _greedy(soft[2], x[:rows], blocks, "BF16")
            assert made is not None and made[0].tolist() == [largest] * rows
            assert made[1].tolist() == [value] * rows


def test_greedy_is_for_few_rows_in_bfloat16(soft: dict[int, KernelTable]) -> None:
    blocks, x = make_blocks("Q8_0", 40, 64), torch.randn(65, 64)
    assert _greedy(soft[1], x[:64], blocks, "Q8_0") is not None
    assert _greedy(soft[1], x, blocks, "Q8_0") is None
    assert _greedy(soft[1], x[:2], blocks, "Q8_0", "int16") is None
    assert _greedy(soft[1], x[:2], make_blocks("F16", 40, 64), "F16") is None


def _greedy(
    table: KernelTable, x: Tensor, blocks: Tensor, name: str, how: InputPrecision = "bfloat16"
) -> tuple[Tensor, Tensor] | None:
    assert table.linear.block_greedy is not None
    return table.linear.block_greedy(x, Packed(blocks, name, how))


def test_a_row_may_end_anywhere(soft: dict[int, KernelTable]) -> None:
    for m in (1, 5):
        x, blocks = torch.randn(m, 75), make_blocks("BF16", 11, 75)
        expected = REF.linear.block_matmul(x, Packed(blocks, "BF16", "bfloat16"))
        actual = soft[1].linear.block_matmul(x, Packed(blocks, "BF16", "bfloat16"))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_tiles_of_this_cpu(fast: KernelTable, soft: dict[int, KernelTable], name: str) -> None:
    """AMX gives what plain code gives, bit by bit; where nothing multiplies bfloat16, nothing is rounded."""
    torch.manual_seed(3)
    has_tiles, rounds = fast.linear.input_precision == "bfloat16", fast.linear.rounds
    for m in (1, 16, 37):
        x, blocks, bias = torch.randn(m, 768), make_blocks(name, 75, 768), torch.randn(75)
        actual = fast.linear.block_matmul(x, Packed(blocks, name, "bfloat16"), bias)
        table, how = (soft[1], "bfloat16") if rounds else (fast, "float32")
        expected = table.linear.block_matmul(x, Packed(blocks, name, how), bias)
        if rounds and not has_tiles:  # pairs in a vector are added in another order
            scale = x.abs() @ fast.linear.block_dequantize(Packed(blocks, name)).abs().T + bias.abs()
            assert ((actual - expected).abs() <= 2e-6 * scale).all()
        else:
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", sorted(set(BLOCKS) - BFLOAT16_TYPES - {"F32"}))
def test_more_exact_types_stay_in_float32(fast: KernelTable, name: str) -> None:
    x, blocks = torch.randn(3, 64), make_blocks(name, 5, 64)
    assert torch.equal(
        fast.linear.block_matmul(x, Packed(blocks, name, "bfloat16")),
        fast.linear.block_matmul(x, Packed(blocks, name)),
    )


def test_not_a_number_stays_in_its_row(soft: dict[int, KernelTable]) -> None:
    blocks, x = make_blocks("Q4_1", 5, 64), torch.zeros(3, 64)
    x[1, 40] = float("nan")
    out = soft[1].linear.block_matmul(x, Packed(blocks, "Q4_1", "bfloat16"))
    assert torch.equal(out[::2], torch.zeros(2, 5)) and out[1].isnan().all()
    assert cpu_table(1).linear.block_matmul(x, Packed(blocks, "Q4_1", "bfloat16"))[1].isnan().all()
