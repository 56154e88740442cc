"""Kernels that get no memory for their work space say so, on whichever thread it is; the library goes on."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.base import env
from octavo.runtime.kernels.cpu.table import cpu_table
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.table import KernelTable

LENGTH = 1 << 23  # of a row: kernels unpack three or more, 96 MiB
ROOM = 48 << 20


@pytest.fixture(params=[1, 2])
def table(request: pytest.FixtureRequest) -> KernelTable:
    if env.kernels_disabled():
        pytest.skip("OCTAVO_NO_CPU_KERNELS is set")
    return cpu_table(request.param)


@contextmanager
def little_memory() -> Iterator[None]:
    """The process may grow by less than one work space."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def long_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Activations, 24 rows of weights that are one in memory, and where their products go."""
    weights = torch.ones(1, LENGTH, dtype=torch.bfloat16).view(torch.uint8).expand(24, -1)
    return torch.ones(1, LENGTH).expand(2, -1), weights, torch.empty(2, 24)


def test_a_call_raises_and_the_next_one_works(table: KernelTable) -> None:
    x, weights, out = long_rows()
    table.linear.block_matmul(x[:, :64], Packed(weights[:, :128], "BF16"), None, out)  # threads are there
    with little_memory(), pytest.raises(MemoryError, match="work space"):
        table.linear.block_matmul(x, Packed(weights, "BF16"), None, out)
    table.linear.block_matmul(x[:, :64], Packed(weights[:, :128], "BF16"), None, out)
    assert torch.equal(out, torch.full((2, 24), 64.0))


def test_a_replay_raises(table: KernelTable) -> None:
    x, weights, out = long_rows()
    size = torch.ones(3, 8)

    def work() -> None:
        table.linear.block_matmul(x, Packed(weights, "BF16"), None, out)
        table.norms.rms_norm(size, size[0], 0.0)

    assert table.steps.record_calls is not None
    repeat = table.steps.record_calls(work)
    assert repeat is not None
    with little_memory(), pytest.raises(MemoryError, match="work space"):
        repeat()
