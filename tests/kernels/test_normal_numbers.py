"""Numbers too small to be normal: zero while kernels run, since they would take hundreds of cycles."""

import platform

import pytest
import torch

from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable

SMALL = 1e-40
ACTIVATIONS: list[Activation] = ["silu", "gelu_tanh"]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors have other means")
def test_zero_for_kernels_only(fast: KernelTable) -> None:
    gates = torch.full((64, 640), SMALL)
    for activation in ACTIVATIONS:
        assert not fast.activate(
            torch.cat([gates, torch.ones_like(gates)], dim=1), activation, gated=True
        ).any()
    assert bool((gates * 1.0).all()), "torch's numbers are its own affair"


def test_large_gates_are_exact(fast: KernelTable) -> None:
    """Where a power of e is no normal number, nor is its reciprocal."""
    x = torch.linspace(-200, 200, 64_000)[None]
    for activation in ACTIVATIONS:
        expected = ref_table().activate(x.double(), activation, gated=False).float()
        made = fast.activate(torch.cat([x, torch.ones_like(x)], dim=1), activation, gated=True)
        torch.testing.assert_close(made, expected, rtol=3e-6, atol=1e-6)
