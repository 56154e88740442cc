"""Kernels over the memory of several ranks: here by Triton's interpreter, over shared memory."""

from types import SimpleNamespace

import pytest
import torch

from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve
from octavo.runtime.distributed import peer_setup
from octavo.runtime.distributed.peer_setup import choose_limits
from octavo.runtime.kernels.peers import MOST_PROGRAMS, NUM_REGIONS, PeerMemory
from octavo.runtime.worker import worker

pytest.importorskip("triton", reason="needs the package triton: pip install triton")
from tests.kernels import peer_process

_REGION_BYTES = 32 << 10


@pytest.mark.matrix
@pytest.mark.parametrize(("size", "first_turn"), [(2, 0), (3, 2**31 - 4)], ids=["two", "three, flags wrap"])
def test_ranks_agree(size, first_turn):
    """Sums in the order of the ranks, to the bit, by one shot and by two; all calls over the same memory."""
    spawn = torch.multiprocessing.get_context("spawn")
    flags = torch.full((MOST_PROGRAMS, size), first_turn, dtype=torch.int32)
    regions = torch.full((NUM_REGIONS * MOST_PROGRAMS * _REGION_BYTES,), 255, dtype=torch.uint8)
    shared = [(regions.clone().share_memory_(), flags.clone().share_memory_()) for _ in range(size)]
    results = spawn.Queue()
    arguments = shared, _REGION_BYTES, first_turn, results
    ranks = [spawn.Process(target=peer_process.run, args=(rank, *arguments)) for rank in range(size)]
    try:
        for process in ranks:
            process.start()
        found = dict(results.get(timeout=60) for _ in ranks)
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
    assert found == {rank: [] for rank in range(size)}


@pytest.mark.parametrize("size", range(2, 9))
def test_what_is_timed_fits(size, monkeypatch):
    """Parts that do not divide evenly take more memory: less is timed then, and nothing fails."""
    from octavo.runtime.kernels.triton import peers

    launched = []
    monkeypatch.setattr(
        peers, "_peer_sum_kernel", {(n,): lambda *a, **_: launched.append(a) for n in range(129)}
    )
    monkeypatch.setattr(peer_setup, "_seconds", lambda work, *_: len(work()))
    monkeypatch.setattr(peer_setup.distributed, "all_reduce", lambda *_, **__: None)
    turns = torch.zeros(MOST_PROGRAMS, dtype=torch.int32)
    memory = PeerMemory(0, size, turns, turns, turns, peer_setup._REGION_BYTES)
    group = SimpleNamespace(all_reduce_by_nccl=lambda x: x, process_group=None)
    peer_setup._measure(memory, SimpleNamespace(sum=peers.sum_ranks), group, None)
    assert len(launched) == 2 * (11 if 4096 % (8 * size) == 0 else 10)


def test_ways_by_size():
    """One shot as long as it is faster than two; nothing behind the first size at which NCCL is faster."""
    times = [[5, 7, 20], [6, 7, 20], [9, 8, 20], [18, 12, 20], [40, 25, 22], [1, 1, 22]]
    assert choose_limits([8, 16, 32, 64, 128, 256], times) == (16, 64)
    assert choose_limits([8, 16], [[9, 9, 3], [1, 1, 3]]) == (0, 0)


def test_nccl_alone(monkeypatch):
    """An option leaves the kernels out."""
    seen = []
    platform = SimpleNamespace(
        device=torch.device("cpu"), kernels=SimpleNamespace(peers="kernels"), graph_capture=lambda: None
    )
    monkeypatch.setattr(worker, "get_platform", lambda *_: platform)
    monkeypatch.setattr(peer_setup, "connect_peers", lambda context, *given: seen.append(given[1]) or context)
    for disabled in False, True:
        worker.Worker(resolve(EngineArgs(device="cpu", disable_custom_all_reduce=disabled)))
    assert seen == ["kernels", None]
