"""Experts that other ranks have: ids of -1 add nothing, among few pairs and among sorted ones."""

import pytest
import torch

from octavo.runtime.kernels.experts import ExpertForm, Routing
from octavo.runtime.kernels.ref import experts as ref

pytest.importorskip("triton", reason="needs the package triton: pip install triton")
from octavo.runtime.kernels.triton import experts
from tests.triton_here import DEVICE


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("kernel", [ref.dense_experts, experts.dense_experts], ids=["ref", "triton"])
def test_experts_of_other_ranks_are_left_out(kernel, rows):
    torch.manual_seed(rows)
    x, up, down = (torch.randn(shape, device=DEVICE) for shape in ((rows, 32), (4, 32, 32), (4, 32, 16)))
    ids = torch.rand(rows, 4, device=DEVICE).argsort(1)[:, :2].int()
    weights, is_foreign = torch.rand(rows, 2, device=DEVICE), torch.rand(rows, 2, device=DEVICE) < 0.5
    is_foreign[0], is_foreign[1] = True, False
    own = Routing(torch.where(is_foreign, -1, ids), weights)
    made = kernel(x, own, up, down, ExpertForm(), None)
    expected = ref.dense_experts(
        x, Routing(ids, weights.masked_fill(is_foreign, 0.0)), up, down, ExpertForm(), None
    )
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)
    assert not made[0].any() and made[1].any()
