"""Replaying recorded calls gives what the calls themselves give, to the bit; other work is refused."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from octavo.runtime.kernels.cpu.call_recorder import Arena
from octavo.runtime.kernels.table import KernelTable
from tests.kernel_cases import CASES, OPS, Case, changed_in, find, run, seen, tensors_in

TORCH_OPS = ("matmul", "gated_matmul", "row_limits", "widen", "ban", "penalize", "count", "score")
TORCH_OPS += ("dense_experts", "multiply")  # torch's own, on a CPU


@pytest.mark.parametrize("op", [op for op in OPS if op not in TORCH_OPS])
def test_repeated_equals_called(fast: KernelTable, op: str) -> None:
    torch.manual_seed(3)
    for case in CASES[op]():
        called, args = run(fast, op, case), copy.deepcopy(case.args)
        repeat, results = recorded(fast, partial(find(fast, op), *args, **case.kwargs))
        given = [tensor.data_ptr() for tensor in tensors_in(args)]
        for result in results:
            if result.data_ptr() not in given:
                result.view(torch.int32).fill_(77)
        assert unchanged(case, args), "something was computed while it was recorded"
        repeat()
        left = [*(seen(op, args, result) for result in results), *changed_in(case, args)]
        for actual, expected in zip(left, called, strict=True):
            assert torch.equal(actual.nan_to_num(7e7), expected.nan_to_num(7e7)), case.name


def record(
    table: KernelTable, work: Callable[..., Any], *lengths: tuple[int, int]
) -> Callable[..., Any] | None:
    assert table.steps.record_calls is not None
    return table.steps.record_calls(work, *lengths)


def recorded(table: KernelTable, work: Callable[[], object]) -> tuple[Callable[[], None], list[Tensor]]:
    """What repeats the work, and the tensors that it leaves."""
    made: list[object] = []
    repeat = record(table, lambda: made.append(work()))
    assert repeat is not None
    (result,) = made
    parts = result if isinstance(result, tuple) else (result,)
    return repeat, [cast(Tensor, part) for part in parts if part is not None]


def unchanged(case: Case, args: tuple[Any, ...]) -> bool:
    pairs = zip(changed_in(case, args), changed_in(case, case.args), strict=True)
    return all(torch.equal(now.nan_to_num(), before.nan_to_num()) for now, before in pairs)


def chain(table: KernelTable, x: Tensor, weight: Tensor, length: int) -> Tensor:
    for _ in range(length):
        x = table.norms.rms_norm(x[:, :64].view(-1, 64), weight, 1e-5)
    return x


def test_large_results_take_turns_in_one_place(fast: KernelTable) -> None:
    x, weight = torch.randn(600, 640), torch.ones(640)
    first = fast.norms.rms_norm(x, weight, 1e-5)
    second, place = fast.norms.rms_norm(x, weight, 1e-5), first.data_ptr()
    assert torch.equal(first, second) and second.data_ptr() != place
    rows = first[300:]
    del first
    assert fast.norms.rms_norm(x, weight, 1e-5).data_ptr() != place, "some of it is still seen"
    del rows
    assert fast.norms.rms_norm(x, weight, 1e-5).data_ptr() == place


def test_inputs_may_change_between_repetitions(fast: KernelTable) -> None:
    x, weight = torch.zeros(6, 70), torch.rand(64)
    repeat, (made,) = recorded(fast, lambda: chain(fast, x, weight, 3))
    for _ in range(2):
        x.normal_()
        repeat()
        assert torch.equal(made, chain(fast, x, weight, 3))


def test_lengths_may_change_between_repetitions(fast: KernelTable) -> None:
    """Two is a size of the work as well as a length, and stays one."""
    x, y, weight = torch.randn(9, 2), torch.randn(6, 2), torch.rand(2)

    def work(rows: int, others: int) -> list[Tensor]:
        return [fast.norms.rms_norm(part, weight, 1e-5) for part in (x[:rows] * 3, y[:others])]

    repeat = record(fast, work, (2, 9), (5, 6))
    assert repeat is not None
    for lengths in ((9, 6), (2, 1), (3, 5), (0, 2)):
        y.normal_()
        made, expected = repeat(*lengths), work(*lengths)
        assert [part.shape for part in made] == [(9, 2), (6, 2)]
        assert all(torch.equal(part[: len(own)], own) for part, own in zip(made, expected, strict=True))


def test_numbers_that_are_made_of_lengths_are_refused(fast: KernelTable) -> None:
    x, weight = torch.randn(9, 64), torch.ones(64)

    def norms(rows: int, count: int = 1) -> list[Tensor]:
        return [fast.norms.rms_norm(x[:rows], weight, 1e-5) for _ in range(count)]

    assert record(fast, norms, (3, 4)) is not None
    assert record(fast, lambda n: norms(2 * n), (3, 4)) is None
    assert record(fast, lambda n: norms(n - 1), (3, 4)) is None
    assert record(fast, lambda n: norms(3, n), (3, 4)) is None, "not as many calls"


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.mul_(2),
        lambda x: x.reshape(4, 4).t().reshape(16),
        lambda x: x.sum().item(),
        lambda x: torch.zeros(3),
        lambda x: torch.empty(300 << 20, dtype=torch.uint8),
        lambda x: x.view(4, 4) + 1,
        lambda x: torch.add(x.view(4, 4), x.view(4, 4), alpha=2),
        lambda x: x.view(4, 4) * x.view(4, 4).t(),
        lambda x: x.view(4, 4) * x[:4, None],
        lambda x: x.view(4, 4).long() * 2,
    ],
    ids=[
        *("new", "in_place", "copy_for_a_view", "value", "filled", "too_large"),
        *("plus_one", "twice", "turned", "by_rows", "integers"),
    ],
)
def test_other_work_is_refused(fast: KernelTable, compute: Callable[[Tensor], object]) -> None:
    x, weight = torch.arange(16.0), torch.ones(64)
    assert record(fast, lambda: compute(x)) is None
    assert chain(fast, torch.ones(1, 64), weight, 1).isfinite().all(), "the library still records"


def test_memory_is_used_again_when_nobody_sees_it() -> None:
    arena = Arena(torch.zeros(1 << 12, dtype=torch.uint8).numpy())
    first, second = (arena.like(torch.empty(3, 5)) for _ in range(2))
    assert second.data_ptr() >= first.data_ptr() + 60
    place, seen = first.data_ptr(), first.view(15)[4:]
    del first
    third = arena.like(torch.empty(2))
    assert third.data_ptr() > second.data_ptr()
    del seen
    assert arena.like(torch.empty(2, 2, dtype=torch.int64)).data_ptr() == place


@pytest.mark.parametrize("size", [3, 64, 83])
@pytest.mark.parametrize(
    "compute",
    [
        lambda x, y, v: x + y,
        lambda x, y, v: x * y,
        lambda x, y, v: x * v,
        lambda x, y, v: v + x,
        lambda x, y, v: 0.22 * x,
        lambda x, y, v: (x * 12)[1:] + y[:-1] * v,
        lambda x, y, v: x.relu() * y,
    ],
    ids=["sum", "product", "scaled", "biased", "times", "several", "relu"],
)
def test_sums_and_products_of_rows_are_recorded(
    fast: KernelTable, compute: Callable[..., Tensor], size: int
) -> None:
    x, y, v = torch.randn(5, 96)[:, :size], torch.randn(5, size), torch.randn(size)
    repeat, (made,) = recorded(fast, lambda: compute(x, y, v))
    for tensor in (x, y, v):
        tensor.normal_()
    x[-1, 0] = float("nan")
    repeat()
    torch.testing.assert_close(made, compute(x, y, v), rtol=0, atol=0, equal_nan=True)
