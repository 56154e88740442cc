"""Products of up to 8 rows with arranged 4-bit matrices on Hopper: a program asks for all its words at once.

Launched by `register_unpack.product`. A program has few outputs and, its warps side by side, their inputs or
a part of them. Words that a loop asks for ahead would not be under way while it works: to wait for some is to
wait for all, since the hardware counts loads and does not name them. Codes become operands as they are, by a
mask and a shift, two at a time; scales and offsets multiply the sums of a group.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.runtime.kernels.triton.arranged import EIGHT_CODES, EIGHT_REGISTERS, EIGHT_TYPES

MOST_ROWS = 8
_LANES = gl.constexpr(32)
_SIZE = gl.constexpr(256)  # inputs of 32 words


# fmt: off
@gluon.jit
def _heads(heads, part, PARTS: gl.constexpr, GROUP: gl.constexpr):
    """Load what a part has beside codes, once for every 32 inputs; beyond the last part nothing."""
    there = part < PARTS
    first = heads + part * (_SIZE // GROUP)
    head = gl.load(first, mask=there, other=0)
    found = (head,)
    for i in gl.static_range(1, 8):
        if i * 32 % GROUP == 0:
            head = gl.load(first + i * 32 // GROUP, mask=there, other=0)
        found = found + (head,)  # type: ignore[assignment]  # noqa: RUF005  # no star in Gluon
    return found


@gluon.jit
def _left(codes, layout: gl.constexpr):
    """Let the 8 codes that a thread has side by side be its parts of two products, 2 and 2 of each."""
    size: gl.constexpr = codes.shape
    codes = codes.reshape([size[0], size[1], 4, 2, 2, 2]).permute((0, 1, 3, 4, 2, 5)).reshape(size)
    return gl.convert_layout(codes, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def _right(inputs, layout: gl.constexpr):
    """Do to columns of x what `_left` does to codes."""
    size: gl.constexpr = inputs.shape
    inputs = inputs.reshape([size[0], 4, 2, 2, 2, size[2]]).permute((0, 2, 3, 1, 4, 5)).reshape(size)
    return gl.convert_layout(inputs, gl.DotOperandLayout(1, layout, 2), assert_trivial=True)


@gluon.jit
def _add(total, words, heads, x, ones, GROUP: gl.constexpr, layout: gl.constexpr):
    """Add the products of words by columns of x; those of a group are scaled together."""
    WARPS: gl.constexpr = total.shape[0]
    TILE_N: gl.constexpr = total.shape[1]
    TILE_M: gl.constexpr = total.shape[2]
    codes = gl.inline_asm_elementwise(EIGHT_CODES, EIGHT_REGISTERS, [words], EIGHT_TYPES, True, 2)
    for j in gl.static_range(8):
        if j * 32 % GROUP == 0:
            product = gl.zeros_like(total)
            sums = gl.zeros([WARPS, 16, TILE_M], gl.float32, layout=layout)
        own = _right(gl.load(x + j * _LANES), layout)
        product = mma_v2(_left(codes[j], layout), own, product)
        sums = mma_v2(ones, own, sums)
        if (j + 1) * 32 % GROUP == 0:
            scale = (heads[j] << 16).to(gl.float32, bitcast=True)
            offset = (heads[j] & -65536).to(gl.float32, bitcast=True) - 128.0 * scale
            if TILE_N == 32:
                sums = gl.join(sums, sums).permute((0, 3, 1, 2)).reshape([WARPS, TILE_N, TILE_M])
            total += gl.convert_layout(sums, layout, assert_trivial=True) * offset.expand_dims(2)
            total += product * scale.expand_dims(2)
    return total


@gluon.jit
def finish(
    total, bias, out, partial, counters, M, stride_out, N,
    layout: gl.constexpr, SPLIT: gl.constexpr, BIASED: gl.constexpr,
):
    """Store a tile [TILE_N, TILE_M]; the last of its parts to come here adds them up, in their order."""
    n = gl.program_id(0) * total.shape[0] + gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, layout))
    m = gl.program_id(2) * total.shape[1] + gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, layout))
    n, m = n.expand_dims(1), m.expand_dims(0)
    inside = (n < N) & (m < M)
    if SPLIT > 1:
        place = m * N + n
        gl.store(partial + gl.program_id(1) * M * N + place, total, mask=inside)
        tl.debug_barrier()
        counter = counters + gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
        if gl.atomic_add(counter, 1, sem="acq_rel") != SPLIT - 1:
            return
        gl.store(counter, 0)
        total = gl.zeros_like(total)
        for index in range(SPLIT):
            total += gl.load(partial + index * M * N + place, mask=inside, other=0.0, cache_modifier=".cg")
    if BIASED:
        total += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)
    gl.store(out + m.to(gl.int64) * stride_out + n, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _part(layout: gl.constexpr, step: gl.constexpr, STEPS: gl.constexpr, PARTS: gl.constexpr):
    """Return which part of K each warp has in a step: those beyond the last get that again, without heads."""
    WARPS: gl.constexpr = gl.num_warps()
    part = (gl.program_id(1) * STEPS + step) * WARPS + gl.arange(0, WARPS, layout=layout)
    return gl.minimum(part, PARTS - 1)


@gluon.jit(do_not_specialize=["M"])
def few_rows_kernel(
    x, blocks, bias, out, partial, counters, M, stride_x, stride_out, N,
    K: gl.constexpr, ROW: gl.constexpr, GROUP: gl.constexpr, TILE_N: gl.constexpr, SPLIT: gl.constexpr,
    BIASED: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):
    """Multiply TILE_N rows of the matrix by all rows of x, over one of SPLIT parts of K, shared out to warps.

    Rows beyond the last are loaded again instead of masked, and not stored.
    """
    PARTS: gl.constexpr = K // _SIZE
    STEPS: gl.constexpr = (PARTS + num_warps * SPLIT - 1) // (num_warps * SPLIT)
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 8)  # as memory has them: see _left
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 8)
    side: gl.constexpr = gl.SliceLayout(2, layout)
    matrix = blocks.to(gl.pointer_type(gl.int32))
    row = gl.program_id(0) * TILE_N + gl.arange(0, TILE_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))
    row = gl.minimum(row, N - 1).expand_dims(0).expand_dims(2)
    lanes = gl.arange(0, _LANES, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))
    rows = matrix + (row * ROW + lanes.expand_dims(0).expand_dims(1))
    row = gl.program_id(0) * TILE_N + gl.arange(0, TILE_N, layout=gl.SliceLayout(0, side))
    heads = matrix + (gl.minimum(row, N - 1).expand_dims(0) * ROW + K // 8)
    m = gl.minimum(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, right))), M - 1)
    k = gl.arange(0, _LANES, layout=gl.SliceLayout(0, gl.SliceLayout(2, right))).expand_dims(0).expand_dims(2)
    columns = x + (m.expand_dims(0).expand_dims(1) * stride_x + k)

    words, beside = (), ()
    for step in gl.static_range(STEPS):
        part = _part(gl.SliceLayout(1, gl.SliceLayout(2, left)), step, STEPS, PARTS)
        own = gl.load(rows + part.expand_dims(1).expand_dims(2) * _LANES)
        words = words + (own,)  # type: ignore[assignment]  # noqa: RUF005  # as above
        part = _part(gl.SliceLayout(1, side), step, STEPS, 1 << 20).expand_dims(1)
        own = _heads(heads, part, PARTS, GROUP)
        beside = beside + (own,)  # type: ignore[assignment]  # noqa: RUF005  # as above
    if PDL:  # weights do not change
        gdc_wait()
        gdc_launch_dependents()
    total = gl.zeros([num_warps, TILE_N, 8], gl.float32, layout=layout)
    ones = gl.full([num_warps, 16, _LANES], 1.0, gl.bfloat16, layout=gl.DotOperandLayout(0, layout, 2))
    for step in gl.static_range(STEPS):
        part = _part(gl.SliceLayout(1, gl.SliceLayout(2, right)), step, STEPS, PARTS)
        here = columns + part.expand_dims(1).expand_dims(2) * _SIZE
        total = _add(total, words[step], beside[step], here, ones, GROUP, layout)

    total = gl.sum(total, 0)
    sums: gl.constexpr = gl.SliceLayout(0, layout)
    finish(total, bias, out, partial, counters, M, stride_out, N, sums, SPLIT, BIASED)
# fmt: on
