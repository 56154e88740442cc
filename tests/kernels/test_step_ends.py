"""Both ends of a recorded step: kernels against references, and the host's side of what they share."""

import numpy as np
import pytest
import torch

from tests.triton_here import DEVICE, HAS_GPU  # skips where there is no Triton

# isort: split
from octavo.runtime.kernels.ref.steps import STEP_KERNELS
from octavo.runtime.kernels.steps import StepRing
from octavo.runtime.kernels.triton.table import cuda_table
from octavo.runtime.worker.pinned_ring import PinnedRing

TRITON = cuda_table().steps
MOST, ROWS, KEPT, LENGTH = 1000, 300, 40, 50


def make_ring(count: int) -> StepRing:
    """A ring of three rows of random numbers, the host's memory where there is a GPU."""
    given = torch.randint(0, KEPT, (3, MOST), pin_memory=HAS_GPU)
    token_ids = torch.full((3, ROWS), -7, pin_memory=HAS_GPU)
    max_logits = torch.full((3, ROWS), -7.0, pin_memory=HAS_GPU)
    masks = torch.randint(-1, 4, (3, ROWS), pin_memory=HAS_GPU)
    return StepRing(given, token_ids, max_logits, torch.tensor([count], device=DEVICE), masks, token_ids)


def copied(ring: StepRing) -> StepRing:
    """The same in memory of its own, the host's page-locked where it was."""
    copies = (part.clone() for part in ring)
    return StepRing(*(copy.pin_memory() if HAS_GPU and not copy.is_cuda else copy for copy in copies))


def assert_equal(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> None:
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(a.cpu(), b.cpu()), index


@pytest.mark.parametrize(
    ("tokens", "rows", "groups", "columns", "numbers", "count"),
    [(1, 1, 1, 4, 9, 0), (32, 32, 1, 68, 32 * 7, 1), (130, 7, 2, 1028, 700, 5), (200, 150, 3, 12, MOST, 2)],
)
def test_beginning(tokens: int, rows: int, groups: int, columns: int, numbers: int, count: int) -> None:
    torch.manual_seed(tokens)
    kept_ids = torch.randint(0, 9999, (KEPT * LENGTH,), device=DEVICE)
    kept_tables = torch.randint(0, 99, (groups, KEPT, columns), dtype=torch.int32, device=DEVICE)
    ring, results = make_ring(count), []
    for begin in (TRITON.begin, STEP_KERNELS.begin):
        shared = copied(ring)
        found = torch.full((numbers + 1,), -1, device=DEVICE)
        ids = torch.full((tokens + 1,), -1, device=DEVICE)
        tables = torch.full((groups * rows + 1, columns), -1, dtype=torch.int32, device=DEVICE)
        shaped = tables[:-1].view(groups, rows, columns)
        begin(shared, found[:-1], kept_ids, kept_tables, ids[:-1], shaped)
        results.append((*shared, found, ids, tables))
    assert_equal(*results)
    assert results[0][3].item() == count + 1
    assert results[0][-2][0] == kept_ids[ring.given[count % 3, 0]]


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (32, 3), (300, 5)])
def test_end(rows: int, count: int) -> None:
    """Ids that are none become valid, and nothing is written beside the rows."""
    torch.manual_seed(rows)
    token_ids = torch.randint(-5, 60, (rows,), device=DEVICE)
    max_logits, targets = torch.randn(rows, device=DEVICE), torch.randperm(999, device=DEVICE)[:rows]
    ring, results = make_ring(count), []
    for end in (TRITON.end, STEP_KERNELS.end):
        shared, kept_ids = copied(ring), torch.full((1000,), -1, device=DEVICE)
        end(shared, token_ids, max_logits, targets, kept_ids, 50, token_ids[: rows * (count > 1)])
        results.append((*shared, kept_ids))
    assert_equal(*results)
    kept = results[0][-1][targets]
    assert kept.min() >= 0 and kept.max() < 50
    assert torch.equal(results[0][1][(count - 1) % 3, :rows].cpu(), kept.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size", "count"), [(1, 31, 1), (5, 9000, 2), (300, 4096, 4)])
def test_masks(rows: int, size: int, count: int, dtype: torch.dtype) -> None:
    """Rows with a mask, of which several may have the same, and rows without."""
    torch.manual_seed(rows)
    words = torch.randint(-(2**31), 2**31 - 1, (4, -(-size // 32)), dtype=torch.int32, device=DEVICE)
    logits, ring = torch.randn(rows, size, device=DEVICE, dtype=dtype), make_ring(count)
    ring.masks[:, 0] = 2
    results = []
    for mask in (TRITON.mask, STEP_KERNELS.mask):
        changed = logits.clone()
        mask(ring, changed, words)
        results.append((changed,))
    assert_equal(*results)
    assert results[0][0][0].isinf().any()
    free = (ring.masks[(count - 1) % 3, :rows] < 0).to(DEVICE)
    assert torch.equal(results[0][0][free], logits[free])


def test_rows_of_a_ring_are_not_overwritten_before_they_are_read() -> None:
    """The device is some steps behind here, and the host reads none of them in time."""
    ring = PinnedRing(8, 4, torch.device("cpu"))
    results = []
    for step in range(11):
        given = ring.give(3)
        assert not given.any(), "what an older step was given"
        given[:] = step
        ids, tables = torch.zeros(1, dtype=torch.int64), torch.zeros((1, 1, 1), dtype=torch.int32)
        numbers = torch.zeros(3, dtype=torch.int64)
        kept = torch.arange(20)
        STEP_KERNELS.begin(
            ring.shared, numbers, kept, torch.zeros((1, 20, 1), dtype=torch.int32), ids, tables
        )
        assert ids.item() == step
        maxima, zero = torch.tensor([step / 2]), torch.tensor([0])
        STEP_KERNELS.end(ring.shared, ids + 1, maxima, zero, kept, 100, ids + 2)
        results.append(ring.end(np.arange(1)))
        if step == 5:
            ring.restart()
    read = [[part.item() for part in result.read()] for result in results]
    assert read == [[step + 1, step / 2, step + 2] for step in range(11)]
    assert np.array_equal(ring.shared.begun, [11 - 6])
