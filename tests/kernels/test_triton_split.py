"""Triton's products in parts, and the norm that adds them up, against references and float64."""

import pytest
import torch

from tests.triton_here import DEVICE, HAS_GPU  # skips where there is no Triton

# isort: split
from octavo.runtime.kernels.norms import PartialSums
from octavo.runtime.kernels.ref.elementwise import add_norm
from octavo.runtime.kernels.triton.table import cuda_table

pytestmark = pytest.mark.matrix(3)

SPLIT = cuda_table().linear.split_product


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, which computes with NumPy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "num_partials"), [((7, 48), 2), ((3, 1100), 3), ((1, 64), 1)])
def test_norm_of_partial_sums(shape, num_partials, dtype):
    torch.manual_seed(2)
    parts = torch.randn(num_partials, *shape, device=DEVICE)
    stream = torch.randn(shape[0], shape[1] + 16, device=DEVICE, dtype=dtype)[:, : shape[1]]
    weight = torch.randn(shape[1], device=DEVICE, dtype=dtype)
    given = PartialSums(parts), weight, 1e-5, stream
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7 if HAS_GPU else 2**-6  # the interpreter rounds down
    for made, expected in zip(SPLIT.norm(*given), add_norm(*given), strict=True):
        assert made.is_contiguous()
        torch.testing.assert_close(made, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_rows", [2, 17, 64])
@pytest.mark.parametrize(("n", "k"), [(64, 1536), (80, 2100), (48, 300)])
def test_parts_of_few_rows(num_rows, n, k):
    """Their sum is the product, which is the same kernel's where nobody else can add them."""
    torch.manual_seed(num_rows)
    x, weight = (torch.randn(rows, k, device=DEVICE, dtype=torch.float16) * 0.1 for rows in (num_rows, n))
    made, exact = SPLIT.matmul(x, weight), x.double() @ weight.double().t()
    assert isinstance(made, PartialSums) == (k > 1024)
    total = made.parts.sum(0) if isinstance(made, PartialSums) else made
    assert (total - exact).norm() < (1e-5 if k > 1024 else 1e-3) * exact.norm()
    assert (cuda_table().linear.matmul(x, weight) - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("num_rows", [65, 128])
def test_a_product_of_few_inputs_is_whole(num_rows):
    torch.manual_seed(num_rows)
    x, weight = (torch.randn(rows, 1984, device=DEVICE, dtype=torch.float16) * 0.1 for rows in (num_rows, 72))
    torch.testing.assert_close(SPLIT.matmul(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize(("num_rows", "k"), [(33, 200), (64, 136)])
def test_gates_of_more_rows(num_rows, k):
    """They follow the product."""
    torch.manual_seed(num_rows)
    x, weight = (torch.randn(rows, k, device=DEVICE, dtype=torch.float16) * 0.2 for rows in (num_rows, 160))
    gates, values = (x.double() @ weight.double().t()).chunk(2, 1)
    exact = torch.nn.functional.silu(gates) * values
    assert (cuda_table().linear.gated_matmul(x, weight) - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("num_rows", "n", "k"), [(2, 48, 300), (16, 80, 700), (30, 40, 2100)])
def test_gates_of_few_rows(num_rows, n, k, biased):
    torch.manual_seed(n)
    x, weight = (torch.randn(rows, k, device=DEVICE, dtype=torch.float16) * 0.2 for rows in (num_rows, 2 * n))
    bias = torch.randn(2 * n, device=DEVICE, dtype=torch.float16) if biased else None
    gates, values = torch.nn.functional.linear(
        x.double(), weight.double(), bias.double() if biased else None
    ).chunk(2, 1)
    exact = torch.nn.functional.silu(gates) * values
    assert (cuda_table().linear.gated_matmul(x, weight, bias) - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_parts_of_a_product(dtype):
    for n, k, num_splits, sizes in (
        (2048, 8192, 2, (65, 128, 200, 336)),
        (1024, 2048, 4, (65, 128, 129, 256)),
    ):
        weight = torch.randn(n, k, device="cuda", dtype=dtype)
        for num_rows in sizes:
            x = torch.randn(num_rows, k, device="cuda", dtype=dtype)
            parts = SPLIT.matmul(x, weight).parts
            exact = x.double() @ weight.double().t()
            assert parts.shape == (num_splits, num_rows, n) and parts.dtype == torch.float32
            assert (parts.sum(0) - exact).norm() < 1e-5 * exact.norm()
        for other in (x[:1], torch.cat([x, x[:1]]), x.float()):
            assert isinstance(SPLIT.matmul(other, weight.to(other.dtype)), torch.Tensor)
