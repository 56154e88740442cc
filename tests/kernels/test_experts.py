"""Experts on hostile routings, against a loop over tokens; and what no company may change."""

import pytest
import torch

from octavo.runtime.kernels.experts import ExpertForm, Router, Routing, Stacks
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable
from tests.kernel_cases import make_blocks

REF = ref_table()
INNER, SIZE = 32, 64


def _matrices(count: int, kind: str = "F32") -> Stacks:
    shapes = (INNER, SIZE), (INNER, SIZE), (SIZE, INNER)
    blocks = (make_blocks(kind, count * n, k, n + k).view(count, n, -1) for n, k in shapes)
    return Stacks(*(Packed(part, kind, "int16") for part in blocks))


def _loop(x: torch.Tensor, routing: Routing, matrices: Stacks) -> torch.Tensor:
    """Every token and expert by itself, in float64."""
    gates, ups, downs = (
        REF.linear.block_dequantize(m._replace(blocks=m.blocks.flatten(0, 1))).view(len(m.blocks), -1, n)
        for m, n in zip(matrices, (SIZE, SIZE, INNER), strict=True)
    )
    out = torch.zeros(len(x), SIZE, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(*routing, strict=True)):
        for expert, weight in zip(ids.tolist(), weights.double(), strict=True):
            if expert < 0:
                continue
            row = x[token].double()
            gate, up = gates[expert].double() @ row, ups[expert].double() @ row
            out[token] += weight * (downs[expert].double() @ (gate * gate.sigmoid() * up))
    return out


def _random(tokens: int, count: int, top_k: int) -> torch.Tensor:
    return torch.rand(tokens, count).argsort(1)[:, :top_k]


ROUTINGS = {
    "all_to_one": (2050, 8, torch.full((2050, 1), 5)),
    "one_each": (64, 64, torch.randperm(64)[:, None]),
    "most_experts_empty": (9, 512, _random(9, 512, 2)),
    "one_token": (1, 512, _random(1, 512, 16)),
    "sixteen_of_512": (40, 512, _random(40, 512, 16)),
    "many_tokens": (4096, 4, _random(4096, 4, 2)),
    "half_elsewhere": (40, 8, _random(40, 16, 3).where(torch.arange(40)[:, None] > 0, 15)),
    "all_elsewhere": (5, 8, torch.full((5, 2), 15)),
}
"""Tokens, experts, and which they choose; those beyond are other ranks'."""


@pytest.mark.parametrize("name", ROUTINGS)
def test_hostile_routings(fast: KernelTable, name: str) -> None:
    torch.manual_seed(0)
    tokens, count, ids = ROUTINGS[name]
    ids = ids.where(ids < count, -1)
    x, matrices = torch.randn(tokens, SIZE), _matrices(count)
    routing = Routing(ids.int().contiguous(), torch.rand(ids.shape))
    actual = fast.experts.block_experts(x, routing, matrices, ExpertForm(), None)
    torch.testing.assert_close(actual.double(), _loop(x, routing, matrices), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_1"])
def test_company_changes_no_bit(fast: KernelTable, kind: str) -> None:
    torch.manual_seed(1)
    x, matrices = torch.randn(200, SIZE), _matrices(16, kind)
    routing = fast.experts.route(torch.randn(200, 16) * 3, None, Router(4))

    def compute(rows: slice | list[int]) -> torch.Tensor:
        given = Routing(routing.ids[rows].contiguous(), routing.weights[rows].contiguous())
        return fast.experts.block_experts(x[rows].contiguous(), given, matrices, ExpertForm(), None)

    whole = compute(slice(None))
    for rows in ([0], [7, 3], list(range(60, 77)), list(range(199, -1, -1))):
        assert torch.equal(compute(rows), whole[rows])


@pytest.mark.parametrize("tokens", [2, 17, 64, 257, 600])
@pytest.mark.parametrize("inner", [32, 96, 40])
def test_tiles_where_weights_lie(fast: KernelTable, tokens: int, inner: int) -> None:
    """With gates and values in one stack, as files have them, experts give the bits that they give apart.

    40: no whole part. Half of the tokens go to one expert, which is more than are multiplied at once.
    """
    torch.manual_seed(3)
    both, downs = (torch.randn(5, n, k).bfloat16() for n, k in ((2 * inner, SIZE), (SIZE, inner)))
    gates, ups, downs = (part.view(torch.uint8) for part in (*both.chunk(2, 1), downs))
    joined = Stacks(*(Packed(part, "BF16", "bfloat16") for part in (gates, ups, downs)))
    apart = joined._replace(gate=joined.gate._replace(blocks=gates.clone()))
    ids = torch.rand(tokens, 5).argsort(1)[:, :2].int()
    ids[::2] = torch.tensor([4, 1])
    x, routing = torch.randn(tokens, SIZE), Routing(ids.contiguous(), torch.rand(tokens, 2))
    made = fast.experts.block_experts(x, routing, joined, ExpertForm(), None)
    assert torch.equal(made, fast.experts.block_experts(x, routing, apart, ExpertForm(), None))
    for row in (0, tokens - 1):
        alone = Routing(routing.ids[[row]], routing.weights[[row]])
        assert torch.equal(
            made[row], fast.experts.block_experts(x[[row]], alone, joined, ExpertForm(), None)[0]
        )
    exact = REF.experts.block_experts(x, routing, joined, ExpertForm(), None)
    assert (made - exact).norm() < 0.02 * exact.norm()


def test_a_row_without_numbers_harms_no_other(fast: KernelTable) -> None:
    torch.manual_seed(2)
    x, matrices, logits = torch.randn(6, SIZE), _matrices(8), torch.randn(6, 8)

    def compute() -> torch.Tensor:
        routing = fast.experts.route(logits, None, Router(2, normalises=True))
        return fast.experts.block_experts(x, routing, matrices, ExpertForm(), None)

    before = compute()
    logits[2, 3], logits[4] = float("nan"), float("-inf")
    after = compute()
    assert after[[2, 4]].isnan().all()
    assert torch.equal(after[[0, 1, 3, 5]], before[[0, 1, 3, 5]])


def test_a_bias_chooses_and_does_not_weigh(fast: KernelTable) -> None:
    """With minus infinity for closed groups: zero, too, is more than some of these scores and biases."""
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([-9.0, -9.0, -1.0, -1.0])
    router = Router(2, "sigmoid", num_groups=2, top_groups=1, best_of_group=2)
    ids, weights = fast.experts.route(logits, bias, router)
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, logits[:, 2:].sigmoid())
