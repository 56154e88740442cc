"""Sums over the memory of other GPUs, by one kernel, without NVLink multicast.

Program b of a rank meets program b of the others and no one else. For a sum it writes its rows into a region
of each other rank, and waits for theirs in its own. A number is its own sign: what is not there yet is -1 in
bits, a NaN, which is left behind when a part is read. So a part takes one way, and no flag and no reading of
another GPU's memory come after it. (One shot and two as in vLLM's custom_all_reduce.cuh; values that are
their own signs as in TensorRT-LLM's Lamport kernels.)

What is not added up is written into a region of one's own: the program says so in a flag of each rank, waits
for theirs, and reads their regions. Flags only ever grow, by one per call.

Regions are used in turns: when one is written again, the others have spoken in the next call, so they have
left the one in which they read it. Nothing needs to be reset between calls, nor between replays of a graph.

A rank that does not come lets the others wait for about two minutes, then their kernels trap.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.peers import ALIGNED, FIRST_MAIL, MOST_PROGRAMS, PIECE, PeerMemory
from octavo.runtime.kernels.sampling import Choice
from octavo.runtime.kernels.triton.launch import cdiv, overlapped, power_of_2, release, wait

_CHOICES = 1024
_PROGRAMS, _MAIL = tl.constexpr(MOST_PROGRAMS), tl.constexpr(FIRST_MAIL)
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
_NOW = tl.constexpr("mov.u64 $0, %clock64;")
_TRAP = tl.constexpr("trap; mov.u32 $0, 0;")
_LONG = tl.constexpr(1 << 38)  # ticks: two minutes at 2.3 GHz


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
def _tell(to, value, mask):
    """Store values where another rank, or this one, `_hear`s them."""
    NARROW: tl.constexpr = value.dtype.primitive_bitwidth == 16
    WORD: tl.constexpr = tl.int16 if NARROW else tl.int32
    bits = value.to(WORD, bitcast=True)
    bits = tl.where(bits == -1, 0x7FFF if NARROW else 0x7FFFFFFF, bits).to(WORD)  # a NaN, too
    tl.store(to.to(tl.pointer_type(WORD), bitcast=True), bits, mask=mask)


@triton.jit
def _hear(parts, stride, own, inside, RANK: tl.constexpr, SIZE: tl.constexpr, PTX: tl.constexpr):
    """Return the sum in float32, rank by rank, of SIZE parts, once they are there; own: that of RANK."""
    WORD: tl.constexpr = tl.int16 if own.dtype.primitive_bitwidth == 16 else tl.int32
    words = parts.to(tl.pointer_type(WORD), bitcast=True)
    total = tl.zeros(own.shape, tl.float32)
    missing = 1
    if PTX:
        began = tl.inline_asm_elementwise(_NOW, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    while missing > 0:
        empty = tl.zeros(own.shape, tl.int32)
        total = tl.zeros(own.shape, tl.float32)
        for rank in tl.static_range(SIZE):
            if rank == RANK:
                total += own.to(tl.float32)
            else:
                bits = tl.load(words + rank * stride, mask=inside, other=0, volatile=True)
                empty |= (bits == -1).to(tl.int32)
                value = bits.to(own.dtype, bitcast=True).to(tl.float32)
                total = value if SIZE == 1 else total + value
        missing = tl.max(empty, 0)
        if PTX:
            now = tl.inline_asm_elementwise(_NOW, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
            if now - began > _LONG:
                tl.inline_asm_elementwise(_TRAP, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            tl.store(words + rank * stride, tl.full(own.shape, -1, WORD), mask=inside)
    return total


@triton.jit
def _inside(place, column, num_elements, COLUMNS: tl.constexpr):
    return (column < COLUMNS) & (place < num_elements)


# fmt: off
@triton.jit
def _add_chunks(
    x, regions, own, box, count, num_elements,
    RANK: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    CHUNK_WIDTH: tl.constexpr, REGION_BYTES: tl.constexpr, PTX: tl.constexpr,
):
    """Add up this rank's chunk of each row, and tell all ranks the sums, which stand behind the parts."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    column = RANK * CHUNK + tl.arange(0, CHUNK_WIDTH)
    for index in range(count):
        place = (program + index * num_programs).to(tl.int64) * COLUMNS + column
        inside = _inside(place, column, num_elements, COLUMNS) & (column < (RANK + 1) * CHUNK)
        here = tl.load(x + place, mask=inside, other=0.0)
        parts = own + index * SIZE * CHUNK + (column - RANK * CHUNK)
        value = _hear(parts, CHUNK, here, inside, RANK, SIZE, PTX).to(x.dtype.element_ty)
        for step in tl.static_range(SIZE):
            to = _region(regions, (RANK + 1 + step) % SIZE, box, x, REGION_BYTES)
            _tell(to + count * SIZE * CHUNK + index * COLUMNS + column, value, inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["turns"])
def _peer_sum_kernel(
    x, residual, weight, total, out, regions, turns, num_rows, num_elements, stride_residual, eps,
    NORM: tl.constexpr, TWO_SHOTS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, CHUNK_WIDTH: tl.constexpr,
    REGION_BYTES: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):
    """Add up every num_programs-th row of COLUMNS. The last may be shorter: there are num_elements in all.

    In two shots, every rank adds up its CHUNK of each row, and tells the others the sums.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, WIDTH)
    if NORM:
        factor = tl.load(weight + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    wait(PDL)
    turn = tl.load(turns + program)
    box = _MAIL + (turn & 1)
    own = _region(regions, RANK, box, x, REGION_BYTES)
    count = (num_rows - program + num_programs - 1) // num_programs
    sums = count * SIZE * CHUNK
    for index in range(count):
        place = (program + index * num_programs).to(tl.int64) * COLUMNS + column
        inside = _inside(place, column, num_elements, COLUMNS)
        told = tl.load(x + place, mask=inside, other=0.0)
        for step in tl.static_range(1, SIZE):
            peer = (RANK + step) % SIZE
            to = _region(regions, peer, box, x, REGION_BYTES) + (index * SIZE + RANK) * CHUNK
            if TWO_SHOTS:
                theirs = inside & (column >= peer * CHUNK) & (column < (peer + 1) * CHUNK)
                _tell(to + (column - peer * CHUNK), told, theirs)
            else:
                _tell(to + column, told, inside)
    release(PDL)
    if TWO_SHOTS:
        _add_chunks(
            x, regions, own, box, count, num_elements,
            RANK, SIZE, COLUMNS, CHUNK, CHUNK_WIDTH, REGION_BYTES, PTX,
        )
    for index in range(count):
        row = (program + index * num_programs).to(tl.int64)
        place = row * COLUMNS + column
        inside = _inside(place, column, num_elements, COLUMNS)
        here = tl.load(x + place, mask=inside, other=0.0)
        if NORM:
            before = tl.load(residual + row * stride_residual + column, mask=inside, other=0.0)
        if TWO_SHOTS:
            value = _hear(own + sums + index * COLUMNS + column, 0, here, inside, -1, 1, PTX)
        else:
            value = _hear(own + index * SIZE * CHUNK + column, CHUNK, here, inside, RANK, SIZE, PTX)
        value = value.to(x.dtype.element_ty)
        if NORM:
            rounded = (value.to(tl.float32) + before.to(tl.float32)).to(total.dtype.element_ty)
            tl.store(total + place, rounded, mask=inside)
            wide = rounded.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + eps)
            value = (wide * scale * factor).to(out.dtype.element_ty)
        tl.store(out + place, value, mask=inside)
    tl.store(turns + program, turn + 1)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["turns"])
def _peer_gather_kernel(
    x, out, regions, flags, turns, num_rows, num_elements,
    RANK: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, REGION_BYTES: tl.constexpr,
    THREADS: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):
    """Gather every num_programs-th row of COLUMNS."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, COLUMNS)
    wait(PDL)
    turn = tl.load(turns + program)
    own = _region(regions, RANK, turn & 1, x, REGION_BYTES)
    count = (num_rows - program + num_programs - 1) // num_programs
    for index in range(count):
        place = (program + index * num_programs).to(tl.int64) * COLUMNS + column
        inside = place < num_elements
        tl.store(own + index * COLUMNS + column, tl.load(x + place, mask=inside, other=0.0), mask=inside)
    _meet(flags, turn + 1, RANK, SIZE, THREADS, PTX)
    release(PDL)
    for index in range(count):
        place = (program + index * num_programs).to(tl.int64) * COLUMNS + column
        inside = place < num_elements
        for rank in tl.static_range(SIZE):
            part = _region(regions, rank, turn & 1, x, REGION_BYTES) + index * COLUMNS + column
            value = tl.load(part, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(out + rank * num_elements + place, value, mask=inside)
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
    own_ids = _region(regions, RANK, turn & 1, ids, REGION_BYTES) + ROWS
    tl.store(own_maxima + row, tl.load(maxima + row, mask=there, other=0.0), mask=there)
    tl.store(own_ids + row, tl.load(ids + row, mask=there, other=0) + start, mask=there)
    _meet(flags, turn + 1, RANK, SIZE, THREADS, PTX)
    release(PDL)
    highest, chosen = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.int64)
    for rank in tl.static_range(SIZE):
        theirs = _region(regions, rank, turn & 1, maxima, REGION_BYTES)
        their_ids = _region(regions, rank, turn & 1, ids, REGION_BYTES) + ROWS
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
    if x.numel():
        _add_up(memory, x, _flat_columns(x), out, None, 0.0, two_shots=two_shots)
    return out


def sum_add_norm(
    memory: PeerMemory, x: Tensor, weight: Tensor, eps: float, residual: Tensor, *, two_shots: bool
) -> tuple[Tensor, Tensor]:
    """See peers.SumAddNorm."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        _add_up(memory, x, x.shape[1], out, (residual, weight, total), eps, two_shots=two_shots)
    return out, total


def _add_up(
    memory: PeerMemory,
    x: Tensor,
    columns: int,
    out: Tensor,
    norm: tuple[Tensor, Tensor, Tensor] | None,
    eps: float,
    *,
    two_shots: bool,
) -> None:
    """Share rows out to programs. Two shots take less memory, too. norm: what it takes"""
    assert x.is_contiguous()
    num_rows, most = cdiv(x.numel(), columns), memory.region_bytes // x.element_size()
    programs = min(MOST_PROGRAMS, num_rows)
    count = cdiv(num_rows, programs)
    two_shots = two_shots or count * memory.size * columns > most
    chunk = cdiv(columns, ALIGNED * memory.size) * ALIGNED if two_shots else columns
    assert count * (memory.size * chunk + columns * two_shots) <= most
    residual, weight, total = norm or (x, x, out)
    kind = {"NORM": norm is not None, "TWO_SHOTS": two_shots, "COLUMNS": columns, "CHUNK": chunk}
    widths = {"WIDTH": power_of_2(columns), "CHUNK_WIDTH": power_of_2(chunk)}
    group = _group(memory, max(4, min(16, power_of_2(columns) // 256)))
    del group["THREADS"]
    tensors = x, residual, weight, total, out, memory.regions, memory.turns
    strides = num_rows, x.numel(), residual.stride(0), eps
    _peer_sum_kernel[(programs,)](*tensors, *strides, **kind, **widths, **group, **overlapped())


def gather(memory: PeerMemory, x: Tensor) -> Tensor:
    """See peers.Gather."""
    assert x.is_contiguous()
    out = x.new_empty((memory.size, *x.shape))
    number, columns = x.numel(), _flat_columns(x)
    if number:
        num_rows = cdiv(number, columns)
        programs = min(MOST_PROGRAMS, num_rows)
        assert cdiv(num_rows, programs) * columns * x.element_size() <= memory.region_bytes
        tensors = x, out, memory.regions, memory.flags, memory.turns
        group = _group(memory, max(4, columns // 256))
        _peer_gather_kernel[(programs,)](*tensors, num_rows, number, COLUMNS=columns, **group, **overlapped())
    return out


def _flat_columns(x: Tensor) -> int:
    return min(PIECE, max(512, power_of_2(x.numel())))


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
