"""Many pairs of tokens and FP8 experts, whose rows are copied in tiles: no interpreter runs the product."""

from pathlib import Path

import pytest
import torch

from tests.triton_here import DEVICE  # skips where there is no Triton

# isort: split
from octavo.runtime.kernels.experts import ExpertForm, Routing, Stacks
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.triton import eight_bits, launch
from octavo.runtime.kernels.triton.experts import block_experts
from octavo.runtime.kernels.triton.routing import sort_pairs
from tests.kernels.test_register_unpack import lines_of_calls

COUNT, SIZE, INNER = 4, 512, 384
SHARED = {"channel": (1, 1 << 20), "block": (128, 128)}


def stack(sharing: str, n: int, k: int) -> Packed:
    codes = (60 * torch.randn(COUNT, n, k)).to(torch.float8_e4m3fn).view(torch.uint8).to(DEVICE)
    shape = (COUNT, n) if sharing == "channel" else (COUNT, n // 128, k // 128)
    return Packed(codes, "F8", "float8", (1e-4 + 1e-3 * torch.rand(shape)).to(DEVICE))


def off(made: torch.Tensor, expected: torch.Tensor) -> float:
    return float((made.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.gpu
@pytest.mark.skipif(not launch.has_gluon(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("sharing", SHARED)
def test_products(sharing: str, weighs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of rounded numbers, the same bits each time, in any order and company."""
    from octavo.runtime.kernels.triton import copied_experts

    calls, multiply = [], copied_experts.multiply
    monkeypatch.setattr(copied_experts, "multiply", lambda *a, **b: (calls.append(1), multiply(*a, **b)))
    torch.manual_seed(1)
    stacks = Stacks(stack(sharing, INNER, SIZE), stack(sharing, INNER, SIZE), stack(sharing, SIZE, INNER))
    x = torch.randn(2100, SIZE, device=DEVICE).bfloat16()
    ids = torch.rand(2100, COUNT, device=DEVICE).argsort(1)[:, :3].int().contiguous()
    ids[::3, 0] = -1
    routing = Routing(ids, torch.rand(2100, 3, device=DEVICE))
    form = ExpertForm("gelu" if weighs else "silu", weighs)
    if weighs:
        biases = (torch.randn(COUNT, n, device=DEVICE).bfloat16() for n in (2 * INNER, SIZE))
        form = ExpertForm("gelu", weighs, *biases)
    floats = form._replace(**{k: b.float() for k, b in form._asdict().items() if isinstance(b, torch.Tensor)})
    expected = ref_table().experts.block_experts(x.float(), routing, stacks, floats, None)
    made = block_experts(x, routing, stacks, form, None)
    assert len(calls) == 2 and off(made, expected) < 0.02
    for part in ("gate", "up", "down"):
        matrix = getattr(stacks, part)
        wrong = stacks._replace(**{part: matrix._replace(scales=matrix.scales.roll(1, 1))})
        assert off(block_experts(x, routing, wrong, form, None), expected) > 0.05
    assert all(torch.equal(block_experts(x, routing, stacks, form, None), made) for _ in range(5))
    turn = torch.randperm(2100, device=DEVICE)
    turned = Routing(ids[turn].contiguous(), routing.weights[turn].contiguous())
    assert torch.equal(block_experts(x[turn], turned, stacks, form, None), made[turn])
    others = torch.randn_like(x)
    others[7] = x[7]
    assert torch.equal(block_experts(others, routing, stacks, form, None)[7], made[7])


@pytest.mark.parametrize("in_groups", [False, True])
def test_copies_of_rows(in_groups: bool) -> None:
    x = torch.randn(5, 392, device=DEVICE).half()[:, :384]
    places = torch.tensor([[3, -1], [-1, -1], [0, 5], [1, 2], [-1, 6]], device=DEVICE, dtype=torch.int32)
    codes, scales = eight_bits.round_copies(x, places, 8, in_groups=in_groups)
    wanted, given = eight_bits.round_inputs(x, "F8", in_groups=in_groups)
    there, rows = [3, 0, 5, 1, 2, 6], [0, 2, 2, 3, 3, 4]
    assert torch.equal(codes.view(torch.uint8)[there], wanted.view(torch.uint8)[rows])
    assert torch.equal(scales[there], (given.t() if in_groups else given[:, None])[rows])


def test_places_of_pairs() -> None:
    ids = torch.randint(-1, COUNT, (70, 3), device=DEVICE, dtype=torch.int32)
    tiles = sort_pairs(ids, COUNT, dtype=torch.half, is_packed=False, rounds=True, many=1)
    assert tiles.sizes == {"TILE_M": 128} and tiles.places.shape == ids.shape
    places, there = tiles.places.flatten(), (ids >= 0).flatten()
    assert (places[~there] == -1).all()
    assert torch.equal(tiles.pairs[places[there]], torch.arange(210, device=DEVICE)[there].int())
    assert int((tiles.pairs >= 0).sum()) == int(there.sum())


def test_programs_wait_before_anything_can_be_seen_of_them() -> None:
    lines = lines_of_calls(Path(launch.__file__).parent / "copied_experts.py")
    for function, first in ("_fetch", "gl.load"), ("_multiply", "gl.load"):
        assert max(lines(function, "gdc_wait")) < min(lines(function, first))
    assert max(lines("_copied_kernel", "gl.warp_specialize")) < min(lines("_copied_kernel", "gdc_launch"))
