"""Every Triton kernel against its twin: some cases in the interpreter; on a GPU all, and in bf16 too."""

import functools
from dataclasses import fields

import pytest
import torch

from tests.triton_here import DEVICE, HAS_GPU  # skips where there is no Triton

# isort: split
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable
from octavo.runtime.kernels.triton.cache import _num_parts
from octavo.runtime.kernels.triton.table import cuda_table
from tests.kernel_cases import CASES, Case, assert_close, make_paged, run

# The interpreter computes with NumPy, which warns of overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
OPS = [field.name for field in fields(KernelTable) if field.name != "name"]
REF, TRITON = ref_table(), cuda_table()
SHARES = 8  # tests per op: so many processes can compile at once
STRIDES = {"paged_attention": 10, "block_matmul": 3, "write_kv": 2}
"""In the interpreter only every n-th case is run."""


@functools.cache
def cases(op: str) -> list[Case]:
    torch.manual_seed(3)
    return list(CASES[op]())[:: 1 if HAS_GPU else STRIDES.get(op, 1)]


def on_device(case: Case, dtype: torch.dtype | None = None) -> Case:
    """The case on the device, slices as slices. Activations become `dtype`; rope tables stay float32."""

    def move(value, index=-1):
        if not isinstance(value, torch.Tensor):
            return value
        is_table = isinstance(case.args[-1], bool) and index in (1, 2)
        target = dtype if dtype and value.dtype == torch.float32 and not is_table else value.dtype
        if value.is_contiguous():
            return value.to(DEVICE, target)
        size = value[0].numel()
        wide = torch.zeros((value.shape[0], size + 64), dtype=target, device=DEVICE)
        return wide[:, 32 : 32 + size].unflatten(1, value.shape[1:]).copy_(value)

    args = tuple(move(value, index) for index, value in enumerate(case.args))
    return Case(case.name, args, {k: move(v) for k, v in case.kwargs.items()}, case.changed, case.tolerance)


def compare(op: str, case: Case, tolerance: float) -> None:
    for actual, expected in zip(run(TRITON, op, case), run(REF, op, case), strict=True):
        assert_close(actual, expected, tolerance, f"{op} {case.name}")


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("op", OPS)
def test_kernel_equals_twin(op: str, share: int) -> None:
    for case in cases(op)[share::SHARES]:
        tolerance = case.tolerance
        if op == "paged_attention":
            tolerance = 1e-5  # the tanh of a soft cap is a quotient here
        elif op == "write_kv" and not HAS_GPU and case.args[2].dtype == torch.bfloat16:
            tolerance = 2**-7  # the interpreter rounds down
        compare(op, on_device(case), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("op", [op for op in OPS if op not in ("block_dequantize", "write_kv")])
def test_narrow_activations(op: str, share: int, dtype: torch.dtype) -> None:
    """One rounding of inputs that are already narrow, up to the twin's own roundings."""
    for case in cases(op)[share::SHARES]:
        if op == "paged_attention" and case.args[1].dtype not in (dtype, torch.float32):
            continue
        compare(op, on_device(case, dtype), 2**-6)


LONG = [
    ([(1, 1000), (1, 17), (1, 640)], 4, 2, 64, 16, 0, 0.0),
    ([(1, 700)], 8, 1, 36, 8, 0, 20.0),
    ([(1, 900), (1, 300)], 2, 2, 32, 16, 500, 0.0),
    ([(1, 500), (1, 65)], 6, 1, 128, 64, 0, 0.0),
]


@pytest.mark.parametrize("lens,heads,kv_heads,head_dim,block_size,window,cap", LONG)
def test_decoding_in_parts(lens, heads, kv_heads, head_dim, block_size, window, cap) -> None:
    paged = make_paged(
        lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, window=window
    )
    options = {"scale": head_dim**-0.5, "sliding_window": window, "soft_cap": cap}
    compare("paged_attention", on_device(Case("parts", paged.args(), options)), 1e-5)


def test_parts_fill_the_device_once() -> None:
    assert _num_parts(8, 64) == 1
    assert _num_parts(8, 16384) == 32
    assert _num_parts(32 * 8, 512) == 1
    assert _num_parts(32 * 8, 16384) == 2
    assert _num_parts(256 * 8, 1 << 20) == 1
    for pairs in range(1, 600, 7):
        assert pairs * _num_parts(pairs, 1 << 20) <= max(528, pairs)


@pytest.mark.parametrize("op", OPS)
def test_nothing_to_do(op: str) -> None:
    case = on_device(next(CASES[op]()))
    if op == "paged_attention":
        q, cache, tables, cu_q_lens, kv_lens = case.args
        case.args = (q[:0], cache, tables[:0], cu_q_lens[:1], kv_lens[:0])
    elif op == "write_kv":
        k, v, cache, slots = case.args
        case.args = (k[:0], v[:0], cache, slots[:0])
    elif op == "apply_rope":
        x, cos, sin, interleaved = case.args
        case.args = (x[:0], cos[:0], sin[:0], interleaved)
    else:
        case.args = (case.args[0][:0], *case.args[1:])
    for actual, expected in zip(run(TRITON, op, case), run(REF, op, case), strict=True):
        assert actual.shape == expected.shape and torch.equal(actual, expected)
