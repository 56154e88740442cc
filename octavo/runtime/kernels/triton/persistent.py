"""Gates of about 128 or 256 rows on Hopper: programs that stay, of which one warp fetches and eight multiply.

Called by `Matmul`. Products of this size draw all the power that the device may, so what they cost in energy
they cost in time: as many programs as get equal numbers of whole tiles leave no last round half empty, and
gates meet their values in registers. For that the copy engine lays 8 gates beside 8 values, in turn, which
are rows r and r + 8 of the tensor cores' result: a thread has both.

Gluon, which says what Triton leaves to its compiler, is experimental: see `launch.has_gluon`.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.runtime.kernels.triton.launch import WAVE, cdiv, overlapped

_RESULTS = 2**14  # of a tile, each from a gate and a value: half of the registers there are
_INPUTS = 64  # of one load
_STAGES = 4
_LEAST_PROGRAMS = 112  # of 132 multiprocessors; fewer were not measured


# fmt: off
@gluon.jit
def _fetch(x, weight, xs, weights, full, empty, num_tiles, K: gl.constexpr, PDL: gl.constexpr):
    """Fill stages, as `_multiply` empties them, with all of x and as many weights as a tile has."""
    STAGES: gl.constexpr = xs.shape[0]
    INPUTS: gl.constexpr = xs.shape[2]
    SIZE: gl.constexpr = x.block_type.nbytes + weight.block_type.nbytes
    load = 0
    if PDL:
        gdc_wait()
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        for k in range(0, K, INPUTS):
            stage = load % STAGES
            filled = full.index(stage)
            mbarrier.wait(empty.index(stage), (load // STAGES & 1) ^ 1)
            mbarrier.expect(filled, SIZE)
            place = [tile * weights.shape[1], 0, 0, k]
            tma.async_copy_global_to_shared(weight, place, filled, weights.index(stage))
            tma.async_copy_global_to_shared(x, [0, k], filled, xs.index(stage))
            load += 1


@gluon.jit
def _multiply(out, xs, weights, outs, full, empty, num_tiles, K: gl.constexpr):
    """Multiply tiles by all rows of x; while a stage is multiplied, the last one is given back."""
    STAGES: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    INPUTS: gl.constexpr = xs.shape[2]
    GROUPS: gl.constexpr = weights.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    load = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        total = gl.zeros([16 * GROUPS, ROWS], gl.float32, layout=layout)
        for k in range(0, K, INPUTS):
            stage = load % STAGES
            mbarrier.wait(full.index(stage), load // STAGES & 1)
            left = weights.index(stage).reshape([16 * GROUPS, INPUTS])
            right = xs.index(stage).permute((1, 0))
            total = warpgroup_mma(left, right, total, use_acc=k > 0, is_async=True)
            total = warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(empty.index((load + STAGES - 1) % STAGES), pred=k > 0)
            load += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index((load + STAGES - 1) % STAGES))
        gates, values = gl.split(total.reshape([GROUPS, 2, 8, ROWS]).permute((0, 2, 3, 1)))
        values = values * gates / (1.0 + gl.exp(-gates))
        tma.store_wait(0)
        outs.permute((1, 0)).store(values.reshape([8 * GROUPS, ROWS]).to(outs.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [0, tile * 8 * GROUPS], outs)
    tma.store_wait(0)


@gluon.jit
def _gates_kernel(x, weight, out, num_tiles, K: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr):
    """Take three descriptors: x's, that of the weights [N / 8, gate or value, 8, K], out's."""
    xs = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)  # noqa: RUF005  # no star in Gluon
    size: gl.constexpr = [STAGES] + weight.block_type.shape  # noqa: RUF005
    weights = gl.allocate_shared_memory(weight.dtype, size, weight.layout)
    outs = gl.allocate_shared_memory(out.dtype, out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    gl.warp_specialize(
        [
            (_multiply, (out, xs, weights, outs, full, empty, num_tiles, K)),
            (_fetch, (x, weight, xs, weights, full, empty, num_tiles, K, PDL)),
        ],
        worker_num_warps=[1],
        worker_num_regs=[24],
    )
    if PDL:
        gdc_launch_dependents()
# fmt: on


def can_share(x: Tensor, num_outputs: int) -> bool:
    """Return True if rows can be copied, and tiles shared out evenly among nearly all multiprocessors."""
    can_copy = x.is_contiguous() and x.shape[1] % 8 == 0 and num_outputs % 8 == 0
    return can_copy and _num_programs(len(x), num_outputs) >= _LEAST_PROGRAMS


def persistent_gates(x: Tensor, weight: Tensor) -> Tensor:
    """See LinearKernels.gated_matmul. x: [M, K], contiguous, M <= 256; K and the outputs multiples of 8."""
    (m, k), n = x.shape, len(weight) // 2
    out = x.new_empty((m, n))
    rows = _num_rows(m)
    outputs = _RESULTS // rows
    flat, deep = (gl.NVMMASharedLayout(128, 16, rank=rank) for rank in (2, 4))
    groups = weight.view(2, n // 8, 8, k).transpose(0, 1)
    _gates_kernel[(_num_programs(m, n),)](
        TensorDescriptor.from_tensor(x, [rows, _INPUTS], flat),
        TensorDescriptor.from_tensor(groups, [outputs // 8, 2, 8, _INPUTS], deep),
        TensorDescriptor.from_tensor(out, [rows, outputs], flat),
        cdiv(n, outputs),
        K=k,
        STAGES=_STAGES,
        num_warps=8,
        **overlapped(),
    )
    return out


def _num_rows(m: int) -> int:
    return 128 if m <= 128 else 256


def _num_programs(m: int, n: int) -> int:
    """Return how many programs have equal numbers of tiles."""
    num_tiles = cdiv(n, _RESULTS // _num_rows(m))
    return cdiv(num_tiles, cdiv(num_tiles, WAVE))
