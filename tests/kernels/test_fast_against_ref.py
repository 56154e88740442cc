"""Every op of the compiled table against its twin, over the cases of tests/kernel_cases.py."""

import copy

import pytest
import torch

from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable
from tests.kernel_cases import CASES, OPS, assert_close, run


@pytest.mark.parametrize("op", OPS)
def test_fast_equals_ref(fast: KernelTable, op: str) -> None:
    torch.manual_seed(1)
    ref = ref_table()
    for case in CASES[op]():
        untouched = copy.deepcopy(case.args)
        for actual, expected in zip(run(fast, op, case), run(ref, op, case), strict=True):
            assert_close(actual, expected, case.tolerance, f"{op} {case.name}")
        for before, after in zip(untouched, case.args, strict=True):
            if isinstance(before, torch.Tensor):
                assert torch.equal(before.nan_to_num(9e9), after.nan_to_num(9e9)), (
                    f"{op} {case.name} changed an input"
                )


@pytest.mark.parametrize("op", OPS)
def test_no_tokens(fast: KernelTable, op: str) -> None:
    case = next(CASES[op]())
    if op == "paged_attention":
        q, cache, tables, cu_q_lens, kv_lens = case.args
        case.args = (q[:0], cache, tables[:0], cu_q_lens[:1], kv_lens[:0])
    elif op == "store_kv":
        q, k, v, cache, slots = case.args
        case.args = (q[:0], k[:0], v[:0], cache, slots[:0])
    elif op == "block_gather":
        blocks, places, name = case.args
        case.args = (blocks, places[:0], name)
    elif op == "row_limits":
        case.args = tuple(arg[:0] for arg in case.args)
    else:
        case.args = (case.args[0][:0], *case.args[1:])
    for actual, expected in zip(run(fast, op, case), run(ref_table(), op, case), strict=True):
        assert actual.shape == expected.shape
