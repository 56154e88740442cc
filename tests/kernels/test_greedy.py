"""The greedy token of compiled kernels, against NumPy's first maximum."""

import numpy as np
import pytest
import torch

from octavo.runtime.kernels.cpu.table import cpu_table
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable

pytestmark = pytest.mark.matrix(3)

INFINITY, NOT_A_NUMBER = float("inf"), float("nan")


@pytest.mark.parametrize("size", [1, 7, 8, 1023, 1024, 1025, 49152])
@pytest.mark.parametrize("threads", [1, 2])
def test_first_of_the_largest(fast: KernelTable, size: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(size)
    wide = torch.randint(-9, 9, (5, size + 3), generator=generator).float()  # many are equal
    wide[1] = -INFINITY
    wide[2, size // 2] = INFINITY
    wide[3, size - 1] = 10
    logits = wide[:, :size]
    ids, max_logits = cpu_table(threads).sampling.choose(logits)
    assert ids.tolist() == np.argmax(logits.numpy(), axis=1).tolist()
    assert torch.equal(max_logits, logits.amax(dim=1))


@pytest.mark.parametrize("place", [0, 3, 1500, 2046])
def test_one_that_is_no_number_spoils_its_row_only(fast: KernelTable, place: int) -> None:
    logits = torch.randn(3, 2047)
    expected = logits.argmax(dim=1).tolist()
    logits[1, place] = NOT_A_NUMBER
    logits[0, 5] = -INFINITY
    ids, max_logits = fast.sampling.choose(logits)
    assert max_logits.isfinite().tolist() == [True, False, True]
    assert 0 <= ids[1] < 2047
    assert ids[[0, 2]].tolist() == [expected[0], expected[2]]
    for mine, reference in zip((ids, max_logits), ref_table().sampling.choose(logits), strict=True):
        assert torch.equal(mine.nan_to_num(7), reference.nan_to_num(7))


def test_replayed_from_recorded_calls(fast: KernelTable) -> None:
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    logits = torch.zeros(4, 300)
    assert fast.steps.record_calls is not None
    repeat = fast.steps.record_calls(lambda: made.append(fast.sampling.choose(logits)))
    assert repeat is not None
    for _ in range(2):
        logits.normal_()
        repeat()
        assert torch.equal(made[0][0], logits.argmax(dim=1))
