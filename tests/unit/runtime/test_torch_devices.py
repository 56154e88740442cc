"""Platforms over torch's own operations, with a torch that seems to have such devices."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.sampling import Draws, Limits
from octavo.runtime.platforms import torch_device
from octavo.runtime.platforms.platform import get_platform

GIB = 1 << 30


@pytest.fixture
def device(monkeypatch):
    """Two devices of 8 GiB, 3 of them in use, whose tensors live on the CPU."""
    module = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        empty_cache=lambda: None,
        mem_get_info=lambda device: (5 * GIB, 8 * GIB),
        recommended_max_memory=lambda: 8 * GIB,
        driver_allocated_memory=lambda: 3 * GIB,
    )
    monkeypatch.setattr(torch, "xpu", module)
    monkeypatch.setattr(torch, "mps", module)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_a_device(kind, device):
    platform = get_platform(f"{kind}:1", 1)
    assert platform.device == torch.device(kind, 1)
    assert platform.available_memory_bytes(0.75) == 3 * GIB
    assert platform.compute_dtype(torch.bfloat16) == torch.bfloat16
    assert platform.graph_capture() is None


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_no_device(kind):
    if getattr(torch, kind).is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=f"device='{kind}:0': torch .* sees 0 such devices here"):
        get_platform(kind, 1)


def test_choices_without_float64():
    """The same tokens, though what comes and goes is float32; noise stays below 1."""
    own = ref_table().sampling
    narrow = torch_device.sampling_on_host(own)
    assert narrow.limits_dtype == np.float32
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)) * 3
    wide = [torch.full((6,), n, dtype=torch.float64) for n in (0.5, 20, 0.75, 0.0)]
    draws = Draws(wide[0], torch.arange(6, dtype=torch.float64) / 8)
    expected = own.choose(logits, draws, Limits(*wide))
    made = narrow.choose(logits, Draws(*(t.float() for t in draws)), Limits(*(t.float() for t in wide)))
    assert torch.equal(made.token_ids, expected.token_ids)
    rows, seeds, limits = torch.arange(4000), torch.arange(4000)[:, None], torch.zeros(4000, 5)
    found = narrow.row_limits(rows, rows, seeds, limits)
    assert found.dtype == torch.float32
    assert found[0].min() >= 0 and found[0].max() < 1
    nearly = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert torch_device._narrowed(nearly) < 1 == nearly.float()
