"""Kernels over memory that ranks on CPUs map together give what torch's collectives give."""

import pytest
import torch

from octavo.runtime.distributed import host_memory
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.distributed.peer_setup import connect_peers
from octavo.runtime.kernels.cpu.library import load_library
from octavo.runtime.kernels.cpu.table import cpu_table
from octavo.runtime.kernels.ref.elementwise import add_norm
from octavo.runtime.kernels.sampling import Choice
from tests.kernels.peer_process import inputs, ordered_sum
from tests.rank_processes import exit_codes

pytestmark = pytest.mark.skipif(load_library() is None, reason="there are no compiled kernels here")
CPU = torch.device("cpu")
SHAPES = [(1, 1), (3, 577), (1, 16384), (40, 1000), (9000, 3)]
"""Of one piece, of exactly one, and of more; choices, too."""


def join(rank, size, meeting):
    torch.set_num_threads(1)
    parallel = ParallelContext.create(rank, size, f"file://{meeting}", CPU)
    return connect_peers(parallel, CPU, cpu_table(1).peers, None)


def agrees(rank, size, meeting, is_wrong):
    parallel = join(rank, size, meeting)
    tp = parallel.tp
    assert tp.peers is not None and parallel.is_recordable
    for turn, shape in enumerate(SHAPES * 3):
        parts = [inputs(r, *shape, torch.float32, turn) for r in range(size)]
        total = ordered_sum(parts)
        if is_wrong and rank == 0:
            parts[0] = parts[0] + 1
        assert torch.equal(parallel.all_reduce(parts[rank].clone()), total)
        assert torch.equal(parallel.all_gather(parts[rank]), torch.cat(parts, 1))
        assert torch.equal(tp.gather_rows(parts[rank]), torch.cat(parts))
        weight, residual = inputs(7, 1, shape[1], torch.float32)[0], inputs(8, *shape, torch.float32)
        made = parallel.defer_sum(parts[rank].clone())(weight, 1e-5, residual)
        torch.testing.assert_close(made, add_norm(total, weight, 1e-5, residual))
        logits = [part.round() for part in parts]
        choice = Choice(logits[rank].argmax(1), logits[rank].max(1).values)
        ids, best = tp.choose(choice, rank * shape[1])
        whole = torch.cat(logits, 1)
        assert torch.equal(best, whole.max(1).values) and torch.equal(ids, whole.argmax(1))
    broken = Choice(torch.zeros(1, dtype=torch.int64), torch.tensor([float("nan") if rank == 1 else 2.0]))
    assert tp.choose(broken, rank).max_logits.isnan().all()
    parallel.close()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree(tmp_path, size):
    """Sums to the bit, in the order of the ranks."""
    assert (
        exit_codes(agrees, [(rank, size, tmp_path / "meeting", False) for rank in range(size)]) == [0] * size
    )


def test_a_wrong_part_is_noticed(tmp_path):
    assert 0 not in exit_codes(agrees, [(rank, 2, tmp_path / "meeting", True) for rank in range(2)])


def stays_apart(rank, size, meeting):
    """A rank that opens a file of another's finds another mark there."""
    usual = host_memory._map
    if rank == 1:
        host_memory._map = lambda pid, file, mark, length: usual(pid, file, b"another mark", length)
    parallel = join(rank, size, meeting)
    assert parallel.tp.peers is None and not parallel.is_recordable
    assert torch.equal(parallel.all_reduce(torch.ones(3)), torch.full((3,), float(size)))
    parallel.close()


def test_torch_sums_where_one_rank_sees_no_memory(tmp_path):
    assert exit_codes(stays_apart, [(rank, 2, tmp_path / "meeting") for rank in range(2)]) == [0, 0]


def test_rows_of_a_part():
    linear, ids = cpu_table(1).linear, torch.tensor([4, 0, 9, 5, 8])
    assert linear.own_rows(ids, 4, 4).tolist() == [0, -1, -1, 1, -1]
