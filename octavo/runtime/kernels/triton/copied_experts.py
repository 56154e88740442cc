"""The grouped product of many pairs with experts in FP8 on Hopper: one warp fetches, two groups multiply.

Called by `experts.multiply`. The rows of a tile are rounded beside each other, so that the copy engine takes
them. Each group of four warps has half of a tile's rows: while it adds a product to its sums, times the
scales, the tensor cores have the other's. Programs stay, so the next tile is fetched while one is stored.

Gluon, which says what Triton leaves to its compiler, is experimental: see `launch.has_gluon`.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.runtime.kernels.experts import Routing
from octavo.runtime.kernels.triton import eight_bits
from octavo.runtime.kernels.triton.experts import Matrices
from octavo.runtime.kernels.triton.launch import overlapped
from octavo.runtime.kernels.triton.rounded_experts import complete
from octavo.runtime.kernels.triton.routing import Tiles

_ROWS = 128  # of a tile
_INPUTS = gl.constexpr(128)  # of one load, and of a group
_HALF = gl.constexpr(64)
_PROGRAMS = 132


# fmt: off
@gluon.jit
def _fetch(
    x, weight, other, experts, xs, ws, full, empty, num_tiles, E: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, UP: gl.constexpr, PDL: gl.constexpr,
):
    """Fill stages, as `_multiply` empties them."""
    STAGES: gl.constexpr = xs.shape[0]
    TILE_N: gl.constexpr = weight.block_type.shape[0]
    SIZE: gl.constexpr = x.block_type.nbytes + weight.block_type.nbytes * (2 if UP else 1)
    load = 0
    if PDL:
        gdc_wait()
    last = num_tiles * (N // TILE_N) - 1
    expert = gl.load(experts + gl.program_id(0) // (N // TILE_N))
    for number in range(gl.program_id(0), last + 1, gl.num_programs(0)):
        tile = number // (N // TILE_N)
        following = gl.load(experts + gl.minimum(number + gl.num_programs(0), last) // (N // TILE_N))
        if (expert >= 0) & (expert < E):
            n = expert * N + number % (N // TILE_N) * TILE_N
            for k in range(0, K, _INPUTS):
                filled, box = full.index(load % STAGES), ws.index(load % STAGES)
                mbarrier.wait(empty.index(load % STAGES), (load // STAGES & 1) ^ 1)
                mbarrier.expect(filled, SIZE)
                tma.async_copy_global_to_shared(x, [tile * xs.shape[1], k], filled, xs.index(load % STAGES))
                if UP:
                    values = box.slice(TILE_N, TILE_N, dim=0)
                    tma.async_copy_global_to_shared(other, [n, k], filled, values)
                    box = box.slice(0, TILE_N, dim=0)
                tma.async_copy_global_to_shared(weight, [n, k], filled, box)
                load += 1
        expert = following


@gluon.jit
def _parts(sums, UP: gl.constexpr):
    """Return gates and values, which a thread has both; else the sums, twice."""
    if UP:
        return gl.split(sums.reshape([sums.shape[0], 2, sums.shape[1] // 2]).permute((0, 2, 1)))
    else:  # noqa: RET505  # both branches of a constant are compiled after a return
        return sums, sums


@gluon.jit
def _sums(
    zeros, given, scales, others, n, xs, ws, full, empty, load, K: gl.constexpr, UP: gl.constexpr,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, HALF: gl.constexpr,
):
    """Return the scaled sums of a tile, and the number of the next load."""
    STAGES: gl.constexpr = xs.shape[0]
    first, second = _parts(zeros, UP)
    sums = zeros
    if GROUPS > 1:
        scales, others = scales + n // ROWS * GROUPS, others + n // ROWS * GROUPS
        factor, a, b = gl.load(given), gl.load(scales), gl.load(others)
    for group in range(K // _INPUTS):
        stage = load % STAGES
        mbarrier.wait(full.index(stage), load // STAGES & 1)
        left = xs.index(stage).slice(HALF * _HALF, _HALF, dim=0)
        more = GROUPS == 1 and group > 0
        sums = warpgroup_mma(left, ws.index(stage).permute((1, 0)), sums, use_acc=more, is_async=True)
        if GROUPS > 1:
            now, now_other = factor * a, factor * b
            place = gl.minimum(group + 1, GROUPS - 1)
            factor, a, b = gl.load(given + place), gl.load(scales + place), gl.load(others + place)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(empty.index(stage))
            gates, values = _parts(sums, UP)
            first += gates * now.expand_dims(1)
            if UP:
                second += values * now_other.expand_dims(1)
            sums, first, second = warpgroup_mma_wait(0, deps=(sums, first, second))  # all was added
        else:
            sums = warpgroup_mma_wait(1, deps=(sums,))
            mbarrier.arrive(empty.index((load + STAGES - 1) % STAGES), pred=group > 0)
        load += 1
    if GROUPS == 1:
        factor = gl.load(given).expand_dims(1)
        own = (n + gl.arange(0, first.shape[1], layout=gl.SliceLayout(0, first.type.layout))) // ROWS
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(empty.index((load + STAGES - 1) % STAGES))
        first, second = _parts(sums, UP)
        first *= factor * gl.load(scales + own).expand_dims(0)
        second *= factor * gl.load(others + own).expand_dims(0)
    return first, second, load


@gluon.jit
def _store(
    first, second, pair, weight, wide_pair, n, expert, bias, out, N: gl.constexpr, UP: gl.constexpr,
    WEIGHS: gl.constexpr, BIASED: gl.constexpr, KIND: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr,
):
    """Store what sums become, in the rows of their pairs, 16 bytes of a row at once."""
    layout: gl.constexpr = first.type.layout
    wide: gl.constexpr = wide_pair.type.layout.parent
    own = n + gl.arange(0, first.shape[1], layout=gl.SliceLayout(0, layout))
    if WEIGHS and UP:
        first, second = first * weight.expand_dims(1), second * weight.expand_dims(1)
    there = pair >= 0
    first, second = complete(
        first, second, pair, there, own, expert, bias, bias, N, UP, True, BIASED, KIND, LIMIT, ALPHA, False
    )
    if not WEIGHS and not UP:
        first *= weight.expand_dims(1)
    own = n + gl.arange(0, first.shape[1], layout=gl.SliceLayout(0, wide))
    target = out + (wide_pair.to(gl.int64) * N).expand_dims(1) + own.expand_dims(0)
    made = gl.convert_layout(first.to(out.dtype.element_ty), wide)
    gl.store(target, made, mask=(wide_pair >= 0).expand_dims(1))


@gluon.jit
def _multiply(
    x_scales, weights, pairs, experts, scales, others, bias, out, xs, ws, full, empty, num_tiles,
    E: gl.constexpr, N: gl.constexpr, K: gl.constexpr, UP: gl.constexpr, ROWS: gl.constexpr,
    GROUPS: gl.constexpr, WEIGHS: gl.constexpr, BIASED: gl.constexpr, KIND: gl.constexpr,
    LIMIT: gl.constexpr, ALPHA: gl.constexpr, HALF: gl.constexpr, PDL: gl.constexpr,
):
    """Multiply one half of each tile's rows. What is needed later is loaded before."""
    WIDE: gl.constexpr = ws.shape[1]
    TILE_N: gl.constexpr = WIDE // 2 if UP else WIDE
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // TILE_N, TILE_N // 8], [4, 1], [1, 0])
    zeros = gl.zeros([_HALF, WIDE], gl.float32, layout=layout)
    first, second = _parts(zeros, UP)
    m = HALF * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, first.type.layout))
    line = HALF * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, wide))
    load = 0
    if PDL:
        gdc_wait()
    last, tile = num_tiles * (N // TILE_N) - 1, gl.program_id(0) // (N // TILE_N)
    expert, pair = gl.load(experts + tile), gl.load(pairs + tile * xs.shape[1] + m)
    for number in range(gl.program_id(0), last + 1, gl.num_programs(0)):
        slot, n = number // (N // TILE_N) * xs.shape[1], number % (N // TILE_N) * TILE_N
        tile = gl.minimum(number + gl.num_programs(0), last) // (N // TILE_N)
        following, next_pair = gl.load(experts + tile), gl.load(pairs + tile * xs.shape[1] + m)
        if (expert >= 0) & (expert < E):
            weight, wide_pair = gl.load(weights + gl.maximum(pair, 0)), gl.load(pairs + slot + line)
            given, own = x_scales + (slot + m).to(gl.int64) * GROUPS, expert * (N // ROWS * GROUPS)
            first, second, load = _sums(
                zeros, given, scales + own, others + own, n, xs, ws, full, empty, load, K, UP, ROWS, GROUPS,
                HALF,
            )
            _store(
                first, second, pair, weight, wide_pair, n, expert, bias, out, N, UP, WEIGHS, BIASED, KIND,
                LIMIT, ALPHA,
            )
        expert, pair = following, next_pair


@gluon.jit(do_not_specialize=["num_tiles"])
def _copied_kernel(
    x, weight, other, x_scales, weights, pairs, experts, scales, others, bias, out, num_tiles,
    E: gl.constexpr, N: gl.constexpr, K: gl.constexpr, UP: gl.constexpr, ROWS: gl.constexpr,
    GROUPS: gl.constexpr, WEIGHS: gl.constexpr, BIASED: gl.constexpr, KIND: gl.constexpr,
    LIMIT: gl.constexpr, ALPHA: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):
    """Compute what `rounded_kernel` does. x, weight, other: descriptors; x has the rows of tiles."""
    WIDE: gl.constexpr = weight.block_type.shape[0] * (2 if UP else 1)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)  # noqa: RUF005  # no star in Gluon
    ws = gl.allocate_shared_memory(weight.dtype, [STAGES, WIDE, _INPUTS], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_multiply, (x_scales, weights, pairs, experts, scales, others, bias, out, xs, ws, full, empty,
                         num_tiles, E, N, K, UP, ROWS, GROUPS, WEIGHS, BIASED, KIND, LIMIT, ALPHA, 0, PDL)),
            (_multiply, (x_scales, weights, pairs, experts, scales, others, bias, out, xs, ws, full, empty,
                         num_tiles, E, N, K, UP, ROWS, GROUPS, WEIGHS, BIASED, KIND, LIMIT, ALPHA, 1, PDL)),
            (_fetch, (x, weight, other, experts, xs, ws, full, empty, num_tiles, E, N, K, UP, PDL)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[216, 24],
    )
    if PDL:
        gdc_launch_dependents()
# fmt: on


def multiply(
    x: Tensor, routing: Routing, tiles: Tiles, by: Matrices, bias: Tensor | None, out: Tensor, **kind: Any
) -> None:
    """See `experts.multiply`; in the tiles that were fastest on an H200."""
    n, is_up, in_groups = by.first.shape[1], kind["UP"], by.how["GROUPS"] > 1
    places, layout = tiles.places if is_up else tiles.places.view(-1, 1), gl.NVMMASharedLayout(128, 8, rank=2)
    codes, x_scales = eight_bits.round_copies(x, places, len(tiles.pairs), in_groups=in_groups)
    wide = 128 if in_groups or (n % 256 and not is_up) else 256
    box = wide // 2 if is_up else wide
    matrices = (
        TensorDescriptor.from_tensor(part.flatten(0, 1), [box, _INPUTS.value], layout)
        for part in (by.first, by.second)
    )
    rows = TensorDescriptor.from_tensor(codes, [_ROWS, _INPUTS.value], layout)
    sorted_by = routing.weights, tiles.pairs, tiles.experts
    tensors = x_scales, *sorted_by, by.scales, by.others, out if bias is None else bias, out, tiles.number
    kind |= {name: by.how[name] for name in ("K", "ROWS", "GROUPS")} | {"E": by.num_experts, "N": n}
    kind |= {"STAGES": 4 if wide == 256 else 5, "BIASED": bias is not None, "num_warps": 4} | overlapped()
    grid = (min(_PROGRAMS, tiles.number * n // box),)
    _copied_kernel[grid](rows, *matrices, *tensors, **kind)
