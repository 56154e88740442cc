"""Sums over the memory of other GPUs, by one kernel, without NVLink multicast.

Program b of a rank meets program b of the others and no one else: it writes its rows into a region of its
own, says so in a flag of each rank, waits for theirs, and reads their regions. Flags only ever grow, by two
per call, and regions are used in turns: when a region is written again, the others have said that they are in
the next call, so they have left the one in which they read it. Nothing needs to be reset between calls, nor
between replays of a graph. (One-shot and two-shot all-reduce as in TensorRT-LLM and vLLM's
custom_all_reduce.cuh; the flags per program are ours.)

A rank that does not come lets the others wait for two minutes, then their kernels trap.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.peers import MOST_PROGRAMS, NUM_REGIONS, PeerMemory
from octavo.runtime.kernels.sampling import Choice
from octavo.runtime.kernels.triton.launch import cdiv, overlapped, power_of_2, release, wait

_COLUMNS = 4096  # of a row, where rows do not matter
_CHOICES = 1024
_SUM, _NORM, _GATHER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_PROGRAMS, _REGIONS = tl.constexpr(MOST_PROGRAMS), tl.constexpr(NUM_REGIONS)
_SAY = tl.constexpr("""{
    .reg .pred %p0;
    setp.ne.u64 %p0, $1, 0;
    @%p0 st.release.sys.global.u32 [$1], $2;
    mov.u32 $0, 0;
}""")
_HEAR = tl.constexpr("""{
    .reg .pred %p0;
    .reg .s32 %seen;
    .reg .u64 %began, %now;
    setp.eq.u64 %p0, $1, 0;
    @%p0 bra there;
    mov.u64 %began, %globaltimer;
again:
    ld.acquire.sys.global.s32 %seen, [$1];
    sub.s32 %seen, %seen, $2;
    setp.ge.s32 %p0, %seen, 0;
    @%p0 bra there;
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %began;
    setp.lt.u64 %p0, %now, 120000000000;
    @%p0 bra again;
    trap;
there:
    mov.u32 $0, 0;
}""")


@triton.jit
def _meet(flags, step, RANK: tl.constexpr, SIZE: tl.constexpr, THREADS: tl.constexpr, PTX: tl.constexpr):
    """Tell this program of all ranks that it has come to `step`, and wait until all have.

    What was written before is visible to all after it. PTX: one thread per rank does it, all at once.
    """
    program = tl.program_id(0)
    tl.debug_barrier()
    if PTX:
        peer = tl.arange(0, THREADS)
        there = peer < SIZE
        target = tl.load(flags + peer, mask=there, other=0) + (program * SIZE + RANK) * 4
        source = tl.load(flags + RANK) + (program * SIZE + peer) * 4
        steps = tl.full([THREADS], 0, tl.int32) + step
        tl.inline_asm_elementwise(
            _SAY, "=r,l,r", [tl.where(there, target, 0), steps], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.inline_asm_elementwise(
            _HEAR, "=r,l,r", [tl.where(there, source, 0), steps], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        for peer in tl.static_range(SIZE):
            target = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + program * SIZE + RANK
            tl.atomic_xchg(target, step, sem="release", scope="sys")
        own = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + program * SIZE
        for peer in tl.static_range(SIZE):
            seen = tl.atomic_add(own + peer, 0, sem="acquire", scope="sys")
            while seen - step < 0:
                seen = tl.atomic_add(own + peer, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def _region(regions, rank, number, like, REGION_BYTES: tl.constexpr):
    """Return where `rank` has the region `number` of this program, for elements as `like` points to."""
    place = (number * _PROGRAMS + tl.program_id(0)).to(tl.int64) * REGION_BYTES
    region = (tl.load(regions + rank) + place).to(tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(region, 16)


@triton.jit
def _add_up(regions, number, place, inside, like, SIZE: tl.constexpr, REGION_BYTES: tl.constexpr):
    total = tl.zeros(place.shape, tl.float32)
    for rank in tl.static_range(SIZE):
        part = _region(regions, rank, number, like, REGION_BYTES)
        total += tl.load(part + place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total.to(like.dtype.element_ty)


@triton.jit
def _inside(place, column, num_elements, MODE: tl.constexpr, COLUMNS: tl.constexpr):
    """Return which elements there are: of whole rows, or of a flat message."""
    return column < COLUMNS if MODE == _NORM else place < num_elements


# fmt: off
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["turns"])
def _peer_sum_kernel(
    x, residual, weight, total, out, regions, flags, turns, num_rows, num_elements, stride_residual, eps,
    MODE: tl.constexpr, TWO_SHOTS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, REGION_BYTES: tl.constexpr, THREADS: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):
    """Add up every num_programs-th row of COLUMNS. The last may be shorter: there are num_elements in all."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, WIDTH)
    if MODE == _NORM:
        factor = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    wait(PDL)
    turn = tl.load(turns + program)
    message = turn & 1
    own = _region(regions, RANK, message, x, REGION_BYTES)
    sums = _region(regions, RANK, message + 2, x, REGION_BYTES)
    count = (num_rows - program + num_programs - 1) // num_programs
    for index in range(count):
        place = (program + index * num_programs).to(tl.int64) * COLUMNS + column
        inside = _inside(place, column, num_elements, MODE, COLUMNS)
        tl.store(own + index * COLUMNS + column, tl.load(x + place, mask=inside, other=0.0), mask=inside)
    _meet(flags, 2 * turn + 1, RANK, SIZE, THREADS, PTX)
    if TWO_SHOTS:
        for index in range(RANK, count, SIZE):
            place = (program + index * num_programs).to(tl.int64) * COLUMNS + column
            inside = _inside(place, column, num_elements, MODE, COLUMNS)
            here = index * COLUMNS + column
            value = _add_up(regions, message, here, inside, x, SIZE, REGION_BYTES)
            tl.store(sums + here, value, mask=inside)
        _meet(flags, 2 * turn + 2, RANK, SIZE, THREADS, PTX)
    release(PDL)
    for index in range(count):
        row = (program + index * num_programs).to(tl.int64)
        place, here = row * COLUMNS + column, index * COLUMNS + column
        inside = _inside(place, column, num_elements, MODE, COLUMNS)
        if MODE == _GATHER:
            for rank in tl.static_range(SIZE):
                part = _region(regions, rank, message, x, REGION_BYTES)
                value = tl.load(part + here, mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(out + rank * num_elements + place, value, mask=inside)
        else:
            if TWO_SHOTS:
                owner = _region(regions, index % SIZE, message + 2, x, REGION_BYTES)
                value = tl.load(owner + here, mask=inside, other=0.0, cache_modifier=".cg")
            else:
                value = _add_up(regions, message, here, inside, x, SIZE, REGION_BYTES)
            if MODE == _NORM:
                before = tl.load(residual + row * stride_residual + column, mask=inside, other=0.0)
                rounded = (value.to(tl.float32) + before.to(tl.float32)).to(total.dtype.element_ty)
                tl.store(total + place, rounded, mask=inside)
                wide = rounded.to(tl.float32)
                scale = tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + eps)
                value = (wide * scale * factor).to(out.dtype.element_ty)
            tl.store(out + place, value, mask=inside)
    tl.store(turns + program, turn + 1)


@triton.jit(do_not_specialize=["num_rows", "start"], do_not_specialize_on_alignment=["turns"])
def _peer_choose_kernel(
    ids, maxima, best_ids, best, regions, flags, turns, num_rows, start,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, REGION_BYTES: tl.constexpr,
    THREADS: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):
    """Choose among the ranks' choices, in one program."""
    row = tl.arange(0, ROWS)
    there = row < num_rows
    wait(PDL)
    turn = tl.load(turns)
    own_maxima = _region(regions, RANK, turn & 1, maxima, REGION_BYTES)
    own_ids = _region(regions, RANK, (turn & 1) + 2, ids, REGION_BYTES)
    tl.store(own_maxima + row, tl.load(maxima + row, mask=there, other=0.0), mask=there)
    tl.store(own_ids + row, tl.load(ids + row, mask=there, other=0) + start, mask=there)
    _meet(flags, 2 * turn + 1, RANK, SIZE, THREADS, PTX)
    release(PDL)
    highest, chosen = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.int64)
    for rank in tl.static_range(SIZE):
        theirs = _region(regions, rank, turn & 1, maxima, REGION_BYTES)
        their_ids = _region(regions, rank, (turn & 1) + 2, ids, REGION_BYTES)
        value = tl.load(theirs + row, mask=there, other=0.0, cache_modifier=".cg")
        token_id = tl.load(their_ids + row, mask=there, other=0, cache_modifier=".cg")
        # Ranks stand in the order of their ids, so the first of equal ones has the lowest; what is not a
        # number is higher than all.
        is_better = (value > highest) | (value != value) | (rank == 0)
        highest, chosen = tl.where(is_better, value, highest), tl.where(is_better, token_id, chosen)
    tl.store(best_ids + row, chosen, mask=there)
    tl.store(best + row, highest, mask=there)
    tl.store(turns, turn + 1)
# fmt: on


def sum_ranks(memory: PeerMemory, x: Tensor, *, two_shots: bool) -> Tensor:
    """See peers.Sum."""
    out = torch.empty_like(x)
    _launch(memory, _SUM.value, x, out, two_shots=two_shots)
    return out


def gather(memory: PeerMemory, x: Tensor) -> Tensor:
    """See peers.Gather."""
    out = x.new_empty((memory.size, *x.shape))
    _launch(memory, _GATHER.value, x, out)
    return out


def sum_add_norm(
    memory: PeerMemory, x: Tensor, weight: Tensor, eps: float, residual: Tensor, *, two_shots: bool
) -> tuple[Tensor, Tensor]:
    """See peers.SumAddNorm."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(memory, _NORM.value, x, out, (residual, weight, total), eps, two_shots=two_shots)
    return out, total


def _launch(
    memory: PeerMemory,
    mode: int,
    x: Tensor,
    out: Tensor,
    norm: tuple[Tensor, Tensor, Tensor] | None = None,
    eps: float = 0.0,
    *,
    two_shots: bool = False,
) -> None:
    """Share rows out to programs, in two shots so that every rank has some of each. norm: what it takes"""
    assert x.is_contiguous()
    number = x.numel()
    if not number:
        return
    columns = min(_COLUMNS, max(512, power_of_2(number))) if norm is None else x.shape[1]
    num_rows = cdiv(number, columns)
    per_region = memory.region_bytes // (columns * x.element_size())
    programs = max(cdiv(num_rows, per_region), cdiv(num_rows, memory.size) if two_shots else num_rows)
    programs = min(MOST_PROGRAMS, programs)
    assert cdiv(num_rows, programs) <= per_region
    residual, weight, total = norm or (x, x, out)
    width = power_of_2(columns)
    warps = max(4, min(16, width // 256))
    tensors = x, residual, weight, total, out, memory.regions, memory.flags, memory.turns
    kind = {"MODE": mode, "TWO_SHOTS": two_shots, "COLUMNS": columns, "WIDTH": width}
    _peer_sum_kernel[(programs,)](
        *tensors, num_rows, number, residual.stride(0), eps, **kind, **_group(memory, warps), **overlapped()
    )


def choose_among(memory: PeerMemory, choice: Choice, start: int) -> Choice:
    """See peers.ChooseAmong."""
    ids, maxima = choice
    best_ids, best = torch.empty_like(ids), torch.empty_like(maxima)
    pieces = [slice(first, first + _CHOICES) for first in range(0, len(ids), _CHOICES)]
    for piece in pieces:
        tensors = ids[piece], maxima[piece], best_ids[piece], best[piece]
        rows = len(tensors[0])
        shared = memory.regions, memory.flags, memory.turns
        _peer_choose_kernel[(1,)](
            *tensors, *shared, rows, start, ROWS=power_of_2(rows), **_group(memory, 4), **overlapped()
        )
    return Choice(best_ids, best)


def _group(memory: PeerMemory, num_warps: int) -> dict[str, int]:
    sizes = {"RANK": memory.rank, "SIZE": memory.size, "REGION_BYTES": memory.region_bytes}
    launch = {"THREADS": 32 * num_warps, "num_warps": num_warps}
    return sizes | launch | {"PTX": not triton.knobs.runtime.interpret}
