"""Products of 8 by 8 bits against products of what the rounded numbers stand for, also in the interpreter."""

import pytest
import torch

from tests.triton_here import DEVICE, HAS_GPU  # skips where there is no Triton

# isort: split
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.blocks import block_matmul, round_rows
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.triton import arranged, eight_bits
from octavo.runtime.kernels.triton.table import cuda_table
from tests.kernel_cases import make_blocks

pytestmark = pytest.mark.matrix(3)

LINEAR = cuda_table().linear
PRECISION = {"F8": "float8", "S8": "int8"}
SHARING = {"channel": (1, 0), "tensor": (0, 0), "group": (1, 128), "block": (128, 128)}
MANY = (70, 150, 300) if HAS_GPU else (70,)
CASES = [(kind, how, rows, n, k) for kind in PRECISION for how in SHARING for rows in (1, 9, *MANY)
         for n, k in ((128, 384), (144, 256))]  # fmt: skip


def blocks(kind, how, n, k):
    """Blocks of 64 weights, whose scales are those of the first of the outputs and inputs that share one."""
    outputs, inputs = SHARING[how]
    raw = make_blocks(f"{kind}_64", n, k).view(n, k // 64, 68)
    rows, columns = torch.arange(n), torch.arange(k // 64)
    rows = rows // outputs * outputs if outputs else rows * 0
    columns = columns // (inputs // 64) * (inputs // 64) if inputs else columns * 0
    raw[:, :, :4] = raw[rows][:, columns][:, :, :4].clone()
    return Packed(raw.view(n, -1).to(DEVICE), f"{kind}_64", PRECISION[kind])


@pytest.fixture(autouse=True)
def exact_rounding(request, monkeypatch):
    """Triton's interpreter loses a carry where it rounds to FP8: there the reference rounds."""
    if HAS_GPU or request.node.name.startswith("test_a_row"):
        return
    kernel = eight_bits.round_inputs

    def rounded(x, name, *, in_groups, gate=None):
        if name == "S8":
            return kernel(x, name, in_groups=in_groups, gate=gate)
        x = x if gate is None else ref_table().activate(x.float(), gate, gated=True)
        codes, scales = round_rows(x, name, in_groups=in_groups)
        return codes, scales.t().contiguous() if in_groups else scales[:, 0].contiguous()

    monkeypatch.setattr(eight_bits, "round_inputs", rounded)


def off(made, expected):
    return float((made - expected).norm() / expected.norm())


@pytest.mark.parametrize(("kind", "how", "rows", "n", "k"), CASES)
def test_products(kind, how, rows, n, k):
    """Within bfloat16's rounding of those of rounded inputs; with scales of other outputs, far from it."""
    torch.manual_seed(rows)
    packed = blocks(kind, how, n, k)
    made = LINEAR.arrange(packed, torch.bfloat16)
    assert made.type_name == kind and made.scales.dim() == (1 if how in ("channel", "tensor") else 2)
    assert made.blocks.nbytes + made.scales.nbytes <= n * k * 1.032
    exact = ref_table().linear.block_dequantize(packed)
    torch.testing.assert_close(LINEAR.block_dequantize(made), exact, rtol=1e-6, atol=0)
    x = torch.randn(rows, k + 8)[:, :k].bfloat16().to(DEVICE)
    bias, wide = torch.randn(n).bfloat16().to(DEVICE), torch.zeros(rows, n + 3).bfloat16().to(DEVICE)
    out = LINEAR.block_matmul(x, made, bias, wide[:, 2 : n + 2])
    assert not wide[:, :2].any() and not wide[:, n + 2 :].any()
    expected = block_matmul(x.double(), made, bias.double())
    assert off(out.double(), expected) < 4e-3
    assert off(out.double(), x.double() @ exact.double().t() + bias.double()) < 0.04
    turned = made._replace(blocks=made.blocks.roll(1, 0))
    assert off(block_matmul(x.double(), turned, bias.double()), expected) > 0.1


@pytest.mark.parametrize("kind", PRECISION if HAS_GPU else ["S8"])
@pytest.mark.parametrize("in_groups", [False, True])
def test_a_row_is_rounded_by_itself(kind, in_groups):
    """To the reference's codes, whatever stands beside it, zeros and large numbers too."""
    x = torch.randn(5, 384).bfloat16()
    x[1], x[2, 7] = 0, 3e4
    codes, scales = eight_bits.round_inputs(x.to(DEVICE), kind, in_groups=in_groups)
    expected, factors = round_rows(x, kind, in_groups=in_groups)
    scales = scales.t() if in_groups else scales[:, None]
    torch.testing.assert_close(scales.cpu(), factors, rtol=1e-6, atol=0)
    differing = codes.cpu().view(torch.uint8) != expected.view(torch.uint8)
    assert differing.float().mean() < 0.01  # a factor's last bit turns ties
    alone, _ = eight_bits.round_inputs(x[3:4].to(DEVICE), kind, in_groups=in_groups)
    assert torch.equal(alone[0].view(torch.uint8), codes[3].view(torch.uint8))


@pytest.mark.parametrize(("splits", "tile_m"), [(3, 16), (2, 64)])
def test_parts_of_inputs(monkeypatch, splits, tile_m):
    """Integers give the same bits in any parts."""
    made, x = LINEAR.arrange(blocks("S8", "channel", 80, 1280), torch.bfloat16), torch.randn(20, 1280)
    x = x.bfloat16().to(DEVICE)
    expected = LINEAR.block_matmul(x, made)
    tiles = eight_bits.tiles
    monkeypatch.setattr(
        eight_bits, "tiles", lambda *shape: tiles(*shape) | {"SPLIT": splits, "TILE_M": tile_m}
    )
    assert torch.equal(LINEAR.block_matmul(x, made), expected)


@pytest.mark.parametrize("kind", PRECISION)
@pytest.mark.parametrize("how", ["channel", "block"])
def test_feed_forward(kind, how):
    """One rounding of the activation; of another activation, it is another."""
    up, down = blocks(kind, how, 512, 256), blocks(kind, how, 128, 256)
    up, down = (LINEAR.arrange(packed, torch.bfloat16) for packed in (up, down))
    x = (torch.randn(3, 256) / 3).bfloat16().to(DEVICE)
    inner = ref_table().activate(block_matmul(x.float(), up).bfloat16().float(), "silu", gated=True)
    expected = block_matmul(inner, down)
    error, other = (
        off(LINEAR.block_feed_forward(x, up, gate, down).float(), expected) for gate in ("silu", "gelu")
    )
    assert error < 0.04 and other > 0.05 and other > 2 * error
    plain = Packed(make_blocks("Q8_0", 128, 256).to(DEVICE), "Q8_0")
    assert LINEAR.block_feed_forward(x, up, "silu", plain) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PRECISION)
@pytest.mark.parametrize("how", ["channel", "block"])
@pytest.mark.parametrize("rows", [1, 64, 65, 129, 300])
def test_many_sizes_on_a_gpu(kind, how, rows):
    """With every kernel that is chosen, also where sums are split; the same bits each time."""
    made = LINEAR.arrange(blocks(kind, how, 4096, 2048), torch.bfloat16)
    x, bias = torch.randn(rows, 2048).bfloat16().to(DEVICE), torch.randn(4096).bfloat16().to(DEVICE)
    product = LINEAR.block_matmul(x, made, bias)
    assert off(product.double(), block_matmul(x.double(), made, bias.double())) < 5e-3
    assert all(torch.equal(product, LINEAR.block_matmul(x, made, bias)) for _ in range(10))


def test_rows_are_rolled_and_looked_up():
    packed = blocks("F8", "block", 128, 256)
    made, places = LINEAR.arrange(packed, torch.bfloat16), torch.tensor([127, 0, 5], device=DEVICE)
    exact = ref_table().linear.block_dequantize(packed)
    torch.testing.assert_close(LINEAR.block_dequantize(made.roll(3)), exact.roll(3, 0))
    torch.testing.assert_close(LINEAR.block_dequantize(made, places, 2.0), exact[places] * 2)


def test_what_is_not_rounded():
    """Weights alone in 8 bits, groups of 64, columns that 128 does not divide."""
    packed = blocks("F8", "channel", 128, 256)._replace(input_precision="float32")
    assert LINEAR.arrange(packed, torch.bfloat16).type_name == "AF8_64"
    assert eight_bits.arrange(Packed(make_blocks("F8_64", 8, 256).to(DEVICE), "F8_64", "float8")) is None
    assert eight_bits.arrange(blocks("S8", "channel", 128, 192)) is None


def test_groups_of_128_keep_one_scale():
    """Of 4-bit and 8-bit weights alone; not where two groups of 64 differ."""
    packed = blocks("F8", "group", 64, 1024)._replace(input_precision="float32")
    made = arranged.arrange(packed, torch.bfloat16)
    assert made.type_name == "AF8_128" and made.blocks.shape[1] == 1024 + 8 * 4
    exact = ref_table().linear.block_dequantize(packed)
    assert off(LINEAR.block_dequantize(made), exact) < 1e-6
    x = torch.randn(7, 1024).bfloat16().to(DEVICE)
    assert off(LINEAR.block_matmul(x, made).float(), x.float() @ exact.t()) < 0.01
    others = Packed(make_blocks("U4_64", 8, 1024).to(DEVICE), "U4_64")
    assert arranged.arrange(others, torch.bfloat16).type_name == "A4_64"


def test_what_runs_is_explained():
    """By kind of matrix: which kernels, and up to how many rows."""
    told = {
        name: LINEAR.explain(LINEAR.arrange(packed, torch.bfloat16))
        for name, packed in {
            "F8": blocks("F8", "channel", 128, 256),
            "S8": blocks("S8", "channel", 128, 256),
            "A4": Packed(make_blocks("Q4_0", 8, 256).to(DEVICE), "Q4_0"),
            "Q6_K": Packed(make_blocks("Q6_K", 8, 256).to(DEVICE), "Q6_K"),
        }.items()
    }
    assert told["F8"].startswith("FP8 by FP8; up to") and told["S8"].startswith(
        "int8 by int8; up to 128 rows"
    )
    assert "rows unpacked in" in told["A4"] and told["Q6_K"].startswith("unpacked for every product")
