"""`join_ranks` makes a worker a rank; `connect_peers` opens the memory of other GPUs for it, or of the host.

It also measures up to which size that is the fastest way. NVLink multicast is not used.
"""

import importlib
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import distributed

from octavo.base.log import get_logger
from octavo.config.expert_load import expert_load
from octavo.config.parallel import ParallelConfig
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.distributed.group import Group
from octavo.runtime.distributed.peers import Limits, Peers
from octavo.runtime.kernels.peers import FIRST_MAIL, MOST_PROGRAMS, NUM_REGIONS, PeerKernels, PeerMemory

logger = get_logger(__name__)

Capture = Callable[[Callable[[], None]], Callable[[], None]]

_REGION_BYTES = 128 << 10
_SIZES = [1 << power for power in range(13, 24)]
"""Of messages that are timed: 8 KiB to 8 MiB."""
_CALLS, _TIMES = 8, 5
_UNLIMITED = 1 << 62


def join_ranks(
    config: ParallelConfig,
    rank: int,
    init_method: str,
    device: torch.device,
    kernels: PeerKernels | None,
    capture: Capture | None,
) -> ParallelContext:
    """Meet the other ranks, and open their memory where that is possible and wanted."""
    replica = (config.data_parallel_rank, config.data_parallel_size) if config.shares_experts else (0, 1)
    context = ParallelContext.create(
        rank,
        config.tensor_parallel_size,
        f"tcp://127.0.0.1:{config.data_parallel_rpc_port}" if config.shares_experts else init_method,
        device,
        pp_size=config.pipeline_parallel_size,
        has_ep=config.enable_expert_parallel,
        timeout_s=config.distributed_timeout_seconds,
        replica=replica,
    )
    context = replace(context, dcp=context.neighbours(config.decode_context_parallel_size))
    if (load := expert_load(config)) is not None:
        context = replace(context, redundant_experts=load.num_redundant_experts)
    return connect_peers(context, device, None if config.disable_custom_all_reduce else kernels, capture)


def connect_peers(
    parallel: ParallelContext, device: torch.device, kernels: PeerKernels | None, capture: Capture | None
) -> ParallelContext:
    """Let the ranks that share each layer open each other's memory, where all of them can."""
    group, on_cpu = parallel.tp, device.type == "cpu"
    if group.process_group is None or kernels is None or (capture is None and not on_cpu):
        return parallel
    if on_cpu:
        from octavo.runtime.distributed.host_memory import open_host_memory

    memory = open_host_memory(group) if on_cpu else _open(group, device)
    if group.least(int(memory is not None), device) == 0 or memory is None:
        logger.info("The ranks do not see each other's memory: torch does all that they say to each other.")
        return parallel
    limits = Limits(_UNLIMITED, _UNLIMITED)
    if not on_cpu:
        assert capture is not None
        limits = _measure(memory, kernels, group, capture)
        logger.info("Sums over ranks: one shot up to %d KiB, two up to %d KiB.", *(n >> 10 for n in limits))
    joined = replace(group, peers=Peers(memory, kernels, limits))
    others = parallel.ep, parallel.world, parallel.dcp
    ep, world, dcp = (joined if other == group else other for other in others)
    return replace(parallel, tp=joined, ep=ep, world=world, dcp=dcp)


def _open(group: Group, device: torch.device) -> PeerMemory | None:
    """Allocate this rank's part and open the others'; None where that is not possible."""
    try:
        if not _are_neighbours(group, device):
            return None
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
        flag_bytes = MOST_PROGRAMS * group.size * 4
        size = flag_bytes + NUM_REGIONS * MOST_PROGRAMS * _REGION_BYTES
        own = symmetric.empty(size, dtype=torch.uint8, device=device).zero_()
        own[-(NUM_REGIONS - FIRST_MAIL) * MOST_PROGRAMS * _REGION_BYTES :].fill_(255)
        torch.cuda.synchronize(device)
        opened = symmetric.rendezvous(own, group.process_group)
        parts = [opened.get_buffer(rank, own.shape, own.dtype) for rank in range(group.size)]
    except (RuntimeError, ImportError, AttributeError, OSError) as error:
        logger.info("Peer memory: %s", error)
        return None
    flags = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=device)
    turns = torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=device)
    memory = PeerMemory(group.rank, group.size, flags + flag_bytes, flags, turns, _REGION_BYTES)
    _KEPT.append((own, opened, parts))
    return memory


_KEPT: list[object] = []
"""What is mapped stays so until the process ends: others may still read it."""


def _are_neighbours(group: Group, device: torch.device) -> bool:
    """Return True if all ranks have GPUs of their own in one host, which reach each other."""
    places: list[tuple[str, int]] = [("", 0)] * group.size
    distributed.all_gather_object(places, (socket.gethostname(), device.index), group=group.process_group)
    hosts, indexes = {host for host, _ in places}, {index for _, index in places}
    if len(hosts) > 1 or len(indexes) < group.size:
        return False
    others = indexes - {device.index}
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


def _measure(memory: PeerMemory, kernels: PeerKernels, group: Group, capture: Capture) -> Limits:
    """Time the three ways, as they will be used, in graphs: the slowest rank's times, so that all agree."""
    device = memory.turns.device
    once, twice = (Peers(memory, kernels, Limits(shot, _UNLIMITED)).all_reduce for shot in (_UNLIMITED, 0))
    graphs: list[Callable[[], None]] = []  # kept: their memory ends with the last of them
    messages = (torch.zeros(size // 2, dtype=torch.bfloat16, device=device) for size in _SIZES)
    timed = [x for x in messages if memory.holds(x)]
    times = torch.zeros((len(timed), 3), dtype=torch.float64, device=device)
    for index, x in enumerate(timed):
        for way, work in enumerate((once, twice, group.all_reduce_by_nccl)):
            times[index, way] = _seconds(partial(work, x), capture, group, graphs)
    distributed.all_reduce(times, distributed.ReduceOp.MAX, group=group.process_group)
    return choose_limits([x.nbytes for x in timed], times.tolist())


def choose_limits(sizes: list[int], times: list[list[float]]) -> Limits:
    """Return up to which size one shot, and then two, are the fastest. times: of both and NCCL, per size"""
    one_shot = two_shots = 0
    for size, (once, twice, nccl) in zip(sizes, times, strict=True):
        if min(once, twice) > nccl:
            break
        two_shots = size
        if once <= twice:
            one_shot = size
    return Limits(one_shot, two_shots)


def _seconds(
    work: Callable[[], object], capture: Capture, group: Group, graphs: list[Callable[[], None]]
) -> float:
    """Return the median time of a call in a graph of some, which is put into `graphs`."""
    device = torch.cuda.current_device()
    work()
    group.least(0, torch.device("cuda", device))

    def several() -> None:
        for _ in range(_CALLS):
            work()

    replay, found = capture(several), list[float]()
    graphs.append(replay)
    replay()
    for _ in range(_TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / _CALLS)
    return median(found)
