"""The references themselves, against oracles that are not ours: the `gguf` package and torch's attention."""

import warnings

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch.nn import functional

from octavo.runtime.kernels.attention import HeadInputs, Rotation, Scores
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.table import ref_table
from tests.kernel_cases import BLOCKS, GROUP_NAMES, TYPE_NAMES, make_paged

REF = ref_table()


@pytest.mark.parametrize("name", sorted(set(TYPE_NAMES) - GROUP_NAMES))
def test_unpacking_random_bytes_equals_the_gguf_package(name: str) -> None:
    kind = BLOCKS[name]
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (7, 1024 // kind.block * kind.num_bytes), dtype=np.uint8)
    with warnings.catch_warnings():  # random scales are infinite here and there
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = quants.dequantize(raw, GGMLQuantizationType[name])
    actual = REF.linear.block_dequantize(Packed(torch.from_numpy(raw), name)).numpy()
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("window", [0, 6])
def test_paged_attention_equals_torch(window: int) -> None:
    lens = [(1, 9), (12, 12), (5, 30)]
    paged = make_paged(lens, heads=6, kv_heads=2, head_dim=16, block_size=4, window=window)
    out = REF.attention.paged_attention(*paged.args(), Scores(0.2, window))
    for r, (q_len, kv_len) in enumerate(lens):
        start = int(paged.cu_q_lens[r])
        slots = [
            (int(b), o) for b in paged.block_tables[r].clamp(max=len(paged.cache) - 1) for o in range(4)
        ][:kv_len]
        k, v = (torch.stack([paged.cache[b, i, o] for b, o in slots], dim=1).nan_to_num() for i in (0, 1))
        distance = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
        visible = (distance >= 0) & ((distance < window) if window else True)
        q = paged.q[start : start + q_len].transpose(0, 1)
        expected = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=visible, scale=0.2, enable_gqa=True
        )[0].transpose(0, 1)
        torch.testing.assert_close(out[start : start + q_len], expected, rtol=1e-5, atol=1e-6)


def test_rope_turns_a_pair_by_its_angle() -> None:
    angle = torch.tensor([[0.3, 1.1]])
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]])
    as_complex = torch.complex(x[0, 0, :2], x[0, 0, 2:4]) * torch.polar(torch.ones(2), angle[0])
    neighbours = torch.view_as_complex(x[0, 0, :4].reshape(2, 2)) * torch.polar(torch.ones(2), angle[0])
    cache, nowhere = torch.zeros(1, 2, 1, 1, 5), torch.tensor([-1])
    halves, pairs = (
        REF.attention.store_kv(
            HeadInputs(x, x, x, Rotation(angle.cos(), angle.sin(), interleaved)), cache, nowhere
        )
        for interleaved in (False, True)
    )
    torch.testing.assert_close(halves[0, 0], torch.cat([as_complex.real, as_complex.imag, x[0, 0, 4:]]))
    torch.testing.assert_close(
        pairs[0, 0], torch.cat([torch.view_as_real(neighbours).flatten(), x[0, 0, 4:]])
    )


def test_rms_norm_equals_torch() -> None:
    x, residual, weight = torch.randn(4, 24), torch.randn(4, 24), torch.randn(24)
    expected = functional.rms_norm(x + residual, (24,), weight, 1e-5)
    y, total = REF.norms.add_norm(x, weight, 1e-5, residual)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(REF.norms.rms_norm(x + residual, weight, 1e-5), expected)
