"""Every op of the compiled table against its reference, over the cases of tests/kernel_cases.py."""

import copy

import pytest
import torch

from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable
from tests.kernel_cases import CASES, OPS, assert_close, nothing_of, run, tensors_in


@pytest.mark.parametrize("op", OPS)
def test_fast_equals_ref(fast: KernelTable, op: str) -> None:
    torch.manual_seed(1)
    ref = ref_table()
    for case in CASES[op]():
        untouched = copy.deepcopy(case.args)
        for actual, expected in zip(run(fast, op, case), run(ref, op, case), strict=True):
            assert_close(actual, expected, case.tolerance, f"{op} {case.name}")
        for before, after in zip(tensors_in(untouched), tensors_in(case.args), strict=True):
            assert torch.equal(before.nan_to_num(9e9), after.nan_to_num(9e9)), (
                f"{op} {case.name} changed an input"
            )


@pytest.mark.parametrize("op", OPS)
def test_no_tokens(fast: KernelTable, op: str) -> None:
    case = next(CASES[op]())
    case.args = nothing_of(op, case)
    for actual, expected in zip(run(fast, op, case), run(ref_table(), op, case), strict=True):
        assert actual.shape == expected.shape
