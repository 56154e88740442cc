"""Attention to both sides by torch's kernels, as GPUs compute it, against the reference."""

import pytest
import torch

from octavo.runtime.kernels.attention import Ragged, Scores
from octavo.runtime.kernels.ref.cache import paged_attention
from octavo.runtime.kernels.triton.both_sides import attend_to_both_sides

LENGTHS = [(5, 5), (9, 9), (5, 5), (0, 7), (4, 30), (1, 1), (5, 5)]
"""New tokens of each request, and all of them."""


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_equals_the_reference(window, num_kv_heads, soft_cap):
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(40, 2, 8, num_kv_heads, 16, generator=generator)
    tables = torch.randperm(40, generator=generator)[: 7 * 5].view(7, 5).int()
    if window:
        tables[4, :2] = 1 << 30  # what no query sees any more
        cache[tables[4, 2], :, :5] = float("nan")
    new, kept = (torch.tensor(column, dtype=torch.int32) for column in zip(*LENGTHS, strict=True))
    q = torch.randn(int(new.sum()), 4, 16, generator=generator)
    bounds = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
    given = (
        q,
        cache,
        tables,
        Ragged(cu_q_lens=bounds, kv_lens=kept),
        Scores(0.25, window, soft_cap, is_causal=False),
    )
    torch.testing.assert_close(attend_to_both_sides(*given), paged_attention(*given), atol=1e-5, rtol=0)
    causal = given[-1]._replace(is_causal=True)
    assert (paged_attention(*given[:-1], causal) - paged_attention(*given)).abs().max() > 1e-2
