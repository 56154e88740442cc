"""Kernels that normalise and do something else: to the bit what one kernel after the other gives."""

import pytest
import torch

from octavo.runtime.kernels.attention import HeadInputs, HeadNorms, Rotation
from octavo.runtime.kernels.ref.elementwise import sandwich_norm
from octavo.runtime.kernels.table import KernelTable
from tests.kernel_cases import CACHE_DTYPES, assert_close, to_cache

pytestmark = pytest.mark.matrix(3)


@pytest.mark.parametrize(("tokens", "size"), [(0, 64), (1, 640), (33, 640), (5, 7), (300, 51)])
def test_a_norm_put_off_gives_the_same_bits(fast: KernelTable, tokens: int, size: int) -> None:
    torch.manual_seed(4)
    x, residual = torch.randn(tokens, size + 5)[:, :size], torch.randn(tokens, 2 * size)[:, size:]
    inner, weight = torch.randn(size), torch.randn(size)
    assert fast.norms.sandwich_norm is not None
    together = fast.norms.sandwich_norm(x, inner, weight, 1e-5, residual)
    apart = fast.norms.add_norm(fast.norms.rms_norm(x, inner, 1e-5), weight, 1e-5, residual)
    reference = sandwich_norm(x, inner, weight, 1e-5, residual)
    for one, two, expected in zip(together, apart, reference, strict=True):
        assert torch.equal(one, two)
        if tokens:
            assert_close(one, expected, 2e-6, f"{tokens}x{size}")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "half"), [(4, 1, 256, 128), (3, 3, 50, 11)])
def test_heads_are_normalised_on_their_way(
    fast: KernelTable,
    heads: int,
    kv_heads: int,
    head_dim: int,
    half: int,
    dtype: torch.dtype,
    interleaved: bool,
) -> None:
    torch.manual_seed(5)
    tokens = 40
    fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim)
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    norms = HeadNorms(torch.randn(head_dim), torch.randn(head_dim), 1e-6)
    angles = torch.randn(tokens, half)
    rotation = Rotation(angles.cos(), angles.sin(), interleaved)
    slots = torch.randperm(48)[:tokens]
    slots[7] = -1
    cache = to_cache(torch.randn(3, 2, 16, kv_heads, head_dim), dtype)
    other = cache.clone()
    normed = fast.norms.rms_norm(q, norms.q_weight, 1e-6), fast.norms.rms_norm(k, norms.k_weight, 1e-6)
    apart = fast.attention.store_kv(HeadInputs(*normed, v, rotation), other, slots)
    together = fast.attention.store_kv(HeadInputs(q, k, v, rotation, norms), cache, slots)
    assert torch.equal(together, apart)
    assert torch.equal(cache, other)
