"""Stacks of experts in bytes are multiplied as they are, whatever their scales serve."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton: pip install triton")

from octavo.runtime.kernels.block_types import TYPES_BY_NAME
from octavo.runtime.kernels.experts import Changes, ExpertForm, Routing, Stacks
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.blocks import round_rows
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.triton import eight_bits
from octavo.runtime.kernels.triton import routing as routing_kernels
from octavo.runtime.kernels.triton.experts import arrange_stack, block_experts
from octavo.runtime.kernels.triton.table import cuda_table
from octavo.runtime.quantization.blocks import Blocks
from octavo.runtime.quantization.experts import BlockExperts, UnpackedExperts
from octavo.runtime.quantization.method import Storage
from tests.kernel_cases import make_blocks
from tests.kernels.test_changed_experts import E, table_of
from tests.triton_here import DEVICE, HAS_GPU

COUNT, SIZE, INNER = 6, 256, 128
PRECISION = {"F8": "float8", "S8": "int8"}
SHARING = {"channel": (1, 1 << 20), "group": (1, 128), "block": (128, 128)}


def stack(kind: str, sharing: str, n: int, k: int) -> Packed:
    outputs, inputs = SHARING[sharing]
    blocks = make_blocks(f"{kind}_64", COUNT * n, k, n + k).view(COUNT, n, -1, 68).clone()
    row = torch.arange(n) // outputs * outputs
    column = torch.arange(k // 64) * 64 // inputs * inputs // 64
    blocks[..., :4] = blocks[:, row][:, :, column, :4]
    return Packed(blocks.view(COUNT, n, -1).to(DEVICE), f"{kind}_64")


@pytest.fixture(params=[(kind, sharing) for kind in ("F8", "S8") for sharing in SHARING])
def stacks(request: pytest.FixtureRequest) -> Stacks:
    shapes = (INNER, SIZE), (INNER, SIZE), (SIZE, INNER)
    return Stacks(*(stack(*request.param, *shape) for shape in shapes))


@pytest.mark.matrix()
@pytest.mark.parametrize("tokens", [1, 5, 90])
def test_products_are_those_of_blocks(stacks: Stacks, tokens: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, SIZE).half().to(DEVICE)
    ids = torch.rand(tokens, COUNT).argsort(1)[:, :2].int()
    routing = Routing(ids.to(DEVICE), torch.rand(tokens, 2).to(DEVICE))
    made = Stacks(*(arrange_stack(part, x.dtype) for part in stacks))
    assert all(
        part.scales is not None and part.blocks.shape[2] == k
        for part, k in zip(made, (SIZE, SIZE, INNER), strict=True)
    )

    def off_by(matrices: Stacks) -> float:
        actual = block_experts(x, routing, matrices, ExpertForm(), None).float()
        return float((actual - expected).norm() / expected.norm())

    expected = ref_table().experts.block_experts(x.float(), routing, stacks, ExpertForm(), None)
    assert off_by(made) < 8e-3
    scales = made.down.scales
    assert scales is not None
    assert off_by(made._replace(down=made.down._replace(scales=scales.roll(1, 0)))) > 0.05


def test_a_method_keeps_bytes_and_nothing_else(stacks: Stacks, monkeypatch: pytest.MonkeyPatch) -> None:
    table = cuda_table()
    kept = Storage(torch.device(DEVICE), torch.half, torch.half, table.linear, table.experts)
    method = UnpackedExperts(kept, rounds_inputs=True)
    given = [Blocks(part.blocks, TYPES_BY_NAME[part.type_name]) for part in stacks]
    monkeypatch.setattr(BlockExperts, "after_load", lambda self: self._keep(*given))
    method.after_load()
    assert [part.type_name for part in method.stacks()] == [stacks.up.type_name[:2]] * 3
    sizes = [tensor.nbytes for tensor in method.slots()]
    assert len(sizes) == 6
    assert sum(sizes) < 1.01 * sum(part.blocks.nbytes for part in stacks), "scales are shared, if at all"
    assert all(len(tensor) == COUNT for tensor in method.slots()), "what a balancer moves"
    assert f"256x128, inputs {PRECISION[stacks.up.type_name[:2]]}" in method.describe()[2]


def test_other_stacks_stay() -> None:
    given = Packed(make_blocks("F8_64", COUNT * INNER, SIZE, 1).view(COUNT, INNER, -1), "F8_64")
    assert arrange_stack(given, torch.bfloat16) is given, "scales of 64 inputs"
    assert arrange_stack(stack("F8", "channel", INNER, SIZE), torch.float32).scales is None


@pytest.fixture
def exact_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference round in Triton's interpreter, which loses a carry where it rounds to FP8."""

    def rounded(x: torch.Tensor, name: str, *, in_groups: bool) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = round_rows(x, name, in_groups=in_groups)
        return codes, scales.t().contiguous() if in_groups else scales[:, 0].contiguous()

    if not HAS_GPU:
        monkeypatch.setattr(eight_bits, "round_inputs", rounded)


def arranged(stacks: Stacks) -> Stacks:
    """Return them as a recipe has them that rounds inputs, too."""
    precision = PRECISION[stacks.up.type_name[:2]]
    return Stacks(*(arrange_stack(part._replace(input_precision=precision), torch.half) for part in stacks))


def off(made: torch.Tensor, expected: torch.Tensor) -> float:
    return float((made.float() - expected.float()).norm() / expected.float().norm())


def draw(ids: torch.Tensor) -> tuple[torch.Tensor, Routing]:
    """Return tokens, with some columns behind that are not theirs, and their routing."""
    torch.manual_seed(len(ids))
    weights = torch.rand(ids.shape).to(DEVICE)
    wide = torch.randn(len(ids), SIZE + 8).half().to(DEVICE)
    wide[len(ids) // 2] *= 5  # which another row's scale would not fit
    return wide[:, :SIZE], Routing(ids.int().contiguous().to(DEVICE), weights)


ROUTINGS = {
    "all_to_one": torch.full((70, 1), 5),
    "half_elsewhere": torch.rand(40, 2 * COUNT, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :3],
    "few_of_many": torch.arange(66)[:, None] // 60 * 4 + torch.tensor([0, 1]),
}
"""Which experts tokens choose; those beyond COUNT are other ranks'."""


@pytest.mark.matrix()
@pytest.mark.parametrize("name", ROUTINGS)
def test_bytes_by_bytes(stacks: Stacks, name: str, exact_rounding: None) -> None:
    """Within half precision of what rounded numbers stand for; with the scales of other rows, far from it."""
    ids = ROUTINGS[name]
    x, routing = draw(ids.where(ids < COUNT, -1))
    made = arranged(stacks)
    form = ExpertForm(
        up_bias=torch.randn(COUNT, 2 * INNER).half().to(DEVICE),
        down_bias=torch.randn(COUNT, SIZE).half().to(DEVICE),
    )
    floats = form._replace(**{part: getattr(form, part).float() for part in ("up_bias", "down_bias")})
    expected = ref_table().experts.block_experts(x.float(), routing, made, floats, None)
    actual = block_experts(x, routing, made, form, None)
    assert off(actual, expected) < 0.01
    for part in ("gate", "up", "down"):
        matrix = getattr(made, part)
        turned = made._replace(**{part: matrix._replace(scales=matrix.scales.roll(1, 0))})
        assert off(block_experts(x, routing, turned, form, None), expected) > 0.03


@pytest.mark.parametrize("stacks", [("F8", "channel"), ("S8", "block")], indirect=True)
def test_a_pair_has_its_own_scale(
    stacks: Stacks, exact_rounding: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With those of the row before, nothing is right; in any order, tokens have the same bits."""
    x, routing = draw(torch.rand(45, COUNT).argsort(1)[:, :2])
    made, form = arranged(stacks), ExpertForm()
    actual = block_experts(x, routing, made, form, None)
    turned = Routing(routing.ids.flip(0).contiguous(), routing.weights.flip(0).contiguous())
    assert torch.equal(block_experts(x.flip(0), turned, made, form, None).flip(0), actual)
    alone = Routing(routing.ids[7:8], routing.weights[7:8])
    assert off(block_experts(x[7:8], alone, made, form, None)[0], actual[7]) < 1e-3, "rounded, too"
    others = torch.randn(45, SIZE).half().to(DEVICE)
    others[7] = x[7]
    assert torch.equal(block_experts(others, routing, made, form, None)[7], actual[7])
    rounds = eight_bits.round_inputs

    def wrong(x: torch.Tensor, name: str, *, in_groups: bool) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = rounds(x, name, in_groups=in_groups)
        return codes, scales.roll(1, -1).contiguous()

    monkeypatch.setattr(eight_bits, "round_inputs", wrong)
    assert off(block_experts(x, routing, made, form, None), actual) > 0.1


@pytest.mark.parametrize("stacks", [("F8", "channel"), ("F8", "group"), ("S8", "channel")], indirect=True)
@pytest.mark.parametrize(("pairs", "weighs"), [(32, False), (64, True), (128, False)])
def test_rounded_in_every_tile(
    stacks: Stacks, pairs: int, weighs: bool, exact_rounding: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of many pairs, whose left operand are the tokens, give what those of few do."""
    x, routing = draw(torch.rand(90, COUNT).argsort(1)[:, :2])
    made, form = arranged(stacks), ExpertForm("gelu", weighs_inputs=weighs)
    expected = ref_table().experts.block_experts(x.float(), routing, made, form, None)
    monkeypatch.setattr(routing_kernels, "tile_sizes", lambda *_, **__: {"TILE_M": pairs})
    assert off(block_experts(x, routing, made, form, None), expected) < 0.01


def test_inputs_that_no_recipe_rounds_stay(stacks: Stacks, exact_rounding: None) -> None:
    x, routing = draw(torch.rand(60, COUNT).argsort(1)[:, :2])
    exact = ref_table().experts.block_experts(x.float(), routing, stacks, ExpertForm(), None)
    plain = Stacks(*(arrange_stack(part, x.dtype) for part in stacks))
    assert off(block_experts(x, routing, plain, ExpertForm(), None), exact) < 4e-3
    assert 6e-3 < off(block_experts(x, routing, arranged(stacks), ExpertForm(), None), exact) < 0.15


@pytest.mark.parametrize("stacks", [("F8", "channel"), ("S8", "block")], indirect=True)
def test_adapters_change_what_is_rounded(stacks: Stacks, exact_rounding: None) -> None:
    """The products are rounded, what adapters add is not; tokens without keep their bits."""
    x, routing = draw(torch.rand(50, E).argsort(1)[:, :2])
    x = x / 32  # what adapters add is large
    slots, made, table = (torch.arange(50) % 5).int().to(DEVICE), arranged(stacks), cuda_table()
    ups, downs = table_of(SIZE, (0, INNER, 2 * INNER), 1, DEVICE), table_of(INNER, (0, SIZE), 2, DEVICE)
    form = ExpertForm(changes=Changes(slots, ups, downs, table.adapters))
    found = table.experts.block_experts(x, routing, made, form, None)
    plain = table.experts.block_experts(x, routing, made, ExpertForm(), None)
    ref = ref_table()
    form = ExpertForm(changes=Changes(slots, ups, downs, ref.adapters))
    assert off(found, ref.experts.block_experts(x.float(), routing, made, form, None)) < 0.01
    is_plain = (slots == 0) | (slots == 3)
    assert torch.equal(found[is_plain], plain[is_plain])
    assert off(found[~is_plain], plain[~is_plain]) > 0.02
