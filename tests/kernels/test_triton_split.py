"""Triton's products in parts, and the norm that adds them up, against twins and float64."""

import pytest
import torch

from tests.triton_here import DEVICE, HAS_GPU  # skips where there is no Triton

# isort: split
from octavo.runtime.kernels.ref.elementwise import sum_norm
from octavo.runtime.kernels.table import Summands
from octavo.runtime.kernels.triton.table import cuda_table

SPLIT = cuda_table().split_product


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, which computes with NumPy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "num_summands"), [((7, 48), 2), ((3, 1100), 3), ((1, 64), 1)])
def test_norm_of_summands(shape, num_summands, dtype):
    torch.manual_seed(2)
    parts = torch.randn(num_summands, *shape, device=DEVICE)
    stream = torch.randn(shape[0], shape[1] + 16, device=DEVICE, dtype=dtype)[:, : shape[1]]
    weight = torch.randn(shape[1], device=DEVICE, dtype=dtype)
    given = Summands(parts), weight, 1e-5, stream
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7 if HAS_GPU else 2**-6  # the interpreter rounds down
    for made, expected in zip(SPLIT.norm(*given), sum_norm(*given), strict=True):
        assert made.is_contiguous()
        torch.testing.assert_close(made, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_of_a_product(dtype):
    weight = torch.randn(2048, 8192, device="cuda", dtype=dtype)
    for num_rows in (33, 64, 200, 256):
        x = torch.randn(num_rows, 8192, device="cuda", dtype=dtype)
        parts = SPLIT.matmul(x, weight).parts
        exact = x.double() @ weight.double().t()
        assert parts.shape == (2, num_rows, 2048) and parts.dtype == torch.float32
        assert (parts.sum(0) - exact).norm() < 1e-5 * exact.norm()
    for other in (x[:32], torch.cat([x, x[:1]]), x.float()):
        assert isinstance(SPLIT.matmul(other, weight.to(other.dtype)), torch.Tensor)
