"""Stacks of experts in bytes are multiplied as they are, whatever their scales serve."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton: pip install triton")

from octavo.runtime.kernels.block_types import TYPES_BY_NAME
from octavo.runtime.kernels.experts import ExpertForm, Routing, Stacks
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.triton.experts import arrange_stack, block_experts
from octavo.runtime.kernels.triton.table import cuda_table
from octavo.runtime.quantization.blocks import Blocks
from octavo.runtime.quantization.experts import BlockExperts, UnpackedExperts
from octavo.runtime.quantization.method import Storage
from tests.kernel_cases import make_blocks
from tests.triton_here import DEVICE

COUNT, SIZE, INNER = 6, 256, 128
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
    method = UnpackedExperts(kept)
    given = [Blocks(part.blocks, TYPES_BY_NAME[part.type_name]) for part in stacks]
    monkeypatch.setattr(BlockExperts, "after_load", lambda self: self._keep(*given))
    method.after_load()
    assert [part.type_name for part in method.stacks()] == [stacks.up.type_name[:2]] * 3
    sizes = [tensor.nbytes for tensor in method.slots()]
    assert len(sizes) == 6
    assert sum(sizes) < 1.01 * sum(part.blocks.nbytes for part in stacks), "scales are shared, if at all"
    assert all(len(tensor) == COUNT for tensor in method.slots()), "what a balancer moves"
    assert "256x128" in method.describe()[2]


def test_other_stacks_stay() -> None:
    given = Packed(make_blocks("F8_64", COUNT * INNER, SIZE, 1).view(COUNT, INNER, -1), "F8_64")
    assert arrange_stack(given, torch.bfloat16) is given, "scales of 64 inputs"
    assert arrange_stack(stack("F8", "channel", INNER, SIZE), torch.float32).scales is None
