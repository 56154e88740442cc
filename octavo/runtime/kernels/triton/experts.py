"""Experts: two grouped products over tokens sorted into tiles (see `routing`), and their sums.

Packed weights are unpacked inside the products. The outputs of a token's experts are added in the order of
its choice, in float32.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.kernels.experts import ExpertForm, Places, Routing, Shared, Stacks
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.blocks import BYTES
from octavo.runtime.kernels.triton import eight_bits
from octavo.runtime.kernels.triton.blocks import PLAIN, constants_of, levels_of, unpack
from octavo.runtime.kernels.triton.elementwise import KINDS
from octavo.runtime.kernels.triton.launch import cdiv, has_gluon, overlapped, power_of_2, release, wait
from octavo.runtime.kernels.triton.rounded_experts import finish, rounded_kernel, shapes
from octavo.runtime.kernels.triton.routing import Tiles, sort_pairs

_SUM_WIDTH = 1024
_MANY_COPIED = 128, 32  # pairs of an expert, with scales of rows and of groups, as measured on an H200
_ROUNDED = "float8", "int8"  # what recipes of 8-bit checkpoints round inputs to


# fmt: off
@triton.jit
def _weights(
    rows, column, mask, levels,
    TYPE: tl.constexpr, IS_GROUP: tl.constexpr, BLOCK: tl.constexpr, NUM_BYTES: tl.constexpr,
):
    """Load a tile of a matrix, plain or packed."""
    if TYPE == "":
        return tl.load(rows + column[None, :], mask=mask, other=0.0)
    else:  # noqa: RET505  # both branches of a constant are compiled after a return
        values = unpack(rows, column[None, :], mask, TYPE, IS_GROUP, BLOCK, NUM_BYTES, levels)
        return tl.where(mask, values, 0.0)


@triton.jit
def _own(scales, n, group, N, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Load the scales of outputs, ROWS of which share one; each has GROUPS of them."""
    return tl.load(scales + n // ROWS * GROUPS + group, mask=(n < N) & (group < GROUPS), other=0.0)


@triton.jit
def _add(
    total, a, b, scales, n, start, column, N, DOT: tl.constexpr, SWAPPED: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Add the product of a tile of x and one of a matrix, whose outputs have GROUPS of scales."""
    b = b.to(a.dtype)
    if not DOT:
        product = a.to(tl.float32) * b.to(tl.float32)
        if GROUPS > 1:
            product *= _own(scales, n[:, None], (start + column)[None, :] // 128, N, ROWS, GROUPS)
        total += product
    elif GROUPS > 1:
        total += tl.dot(b, tl.trans(a)) * _own(scales, n, start // 128, N, ROWS, GROUPS)[:, None]
    elif SWAPPED:
        total = tl.dot(b, tl.trans(a), total)
    else:
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    return total


@triton.jit
def _product(
    x, row, there, matrix, other, n, N, levels, scales, others, K: tl.constexpr, ROW: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, PAIRED: tl.constexpr, factor,
    DOT: tl.constexpr, WEIGHED: tl.constexpr, TYPE: tl.constexpr, IS_GROUP: tl.constexpr,
    BLOCK: tl.constexpr, NUM_BYTES: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):
    """Multiply rows of x by TILE_N rows of a matrix, ROW apart, and by those of another if PAIRED.

    Without DOT there is one row of x, whose products are added up along K in the end. Bytes are the left
    operand, which tensor cores take from the registers they are converted in.
    """
    SWAPPED: tl.constexpr = DOT and ROWS > 0
    column = tl.arange(0, TILE_K)
    if SWAPPED:
        first = tl.zeros([TILE_N, TILE_M], tl.float32)
    elif DOT:
        first = tl.zeros([TILE_M, TILE_N], tl.float32)
    else:
        first = tl.zeros([TILE_N, TILE_K], tl.float32)
    second = first
    place = (n.to(tl.int64) * ROW)[:, None]
    for start in range(0, K, TILE_K):
        inside = (start + column) < K
        source = x + row[:, None] + start + column[None, :]
        a = tl.load(source, mask=there[:, None] & inside[None, :], other=0.0)
        if WEIGHED:
            a = (a.to(tl.float32) * factor[:, None]).to(a.dtype)
        mask = (n < N)[:, None] & inside[None, :]
        b = _weights(matrix + place, start + column, mask, levels, TYPE, IS_GROUP, BLOCK, NUM_BYTES)
        first = _add(first, a, b, scales, n, start, column, N, DOT, SWAPPED, ROWS, GROUPS)
        if PAIRED:
            b = _weights(other + place, start + column, mask, levels, TYPE, IS_GROUP, BLOCK, NUM_BYTES)
            second = _add(second, a, b, others, n, start, column, N, DOT, SWAPPED, ROWS, GROUPS)
    if SWAPPED:
        first, second = tl.trans(first), tl.trans(second)
    elif not DOT:
        first, second = tl.sum(first, 1)[None, :], tl.sum(second, 1)[None, :]
    if ROWS > 0 and GROUPS == 1:
        first *= _own(scales, n, 0, N, ROWS, 1)[None, :]
        if PAIRED:
            second *= _own(others, n, 0, N, ROWS, 1)[None, :]
    return first, second


@triton.jit(do_not_specialize=["num_pairs"])
def _expert_kernel(
    x, weights, ids, pairs, experts, matrix, other, levels, scales, others, places, bias, out, num_pairs,
    stride_x, E: tl.constexpr, TOP_K: tl.constexpr, N: tl.constexpr, K: tl.constexpr, UP: tl.constexpr,
    STRIDE: tl.constexpr, ROW: tl.constexpr, WEIGHS: tl.constexpr, BIASED: tl.constexpr, KIND: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, SORTED: tl.constexpr, TYPE: tl.constexpr,
    IS_GROUP: tl.constexpr, BLOCK: tl.constexpr, NUM_BYTES: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, PDL: tl.constexpr, PLACED: tl.constexpr = False, APART: tl.constexpr = False,
):
    """Compute N outputs of an expert for pairs; UP: of tokens, gates and values; else of what these made.

    matrix, other: of gates and of values, those of experts STRIDE apart; PLACED: at their places
    APART: gates and values side by side, as they are
    """
    tile = tl.program_id(1)
    wait(PDL)
    if SORTED:
        expert = tl.load(experts + tile)
        if (expert < 0) | (expert >= E):
            return
        pair = tl.load(pairs + tile * TILE_M + tl.arange(0, TILE_M))
        there = pair >= 0
    else:
        expert, pair = tl.load(ids + tile), tile + tl.arange(0, TILE_M)
        if (expert < 0) | (expert >= E):
            return
        there = pair < num_pairs
    pair = tl.where(there, pair, 0).to(tl.int64)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    factor = tl.full([TILE_M], 1.0, tl.float32)
    if WEIGHS and UP:
        factor = tl.load(weights + pair, mask=there, other=0.0)
    row = pair // TOP_K * stride_x if UP else pair * stride_x
    begin = expert.to(tl.int64) * STRIDE
    if PLACED:
        begin = tl.load(places + expert)
        if STRIDE % 16 == 0:
            begin = tl.multiple_of(begin, 16)
    if ROWS > 0:
        scales += expert * (N // ROWS * GROUPS)
        others += expert * (N // ROWS * GROUPS)
    first, second = _product(
        x, row, there, matrix + begin, other + begin, n, N, levels, scales, others, K, ROW, TILE_M, TILE_N,
        TILE_K, UP, factor, SORTED, WEIGHS and UP, TYPE, IS_GROUP, BLOCK, NUM_BYTES, ROWS, GROUPS,
    )
    release(PDL)
    finish(
        first, second, pair, there, n, expert, weights, bias, out, N, UP, WEIGHS, BIASED, KIND, LIMIT, ALPHA,
        APART,
    )


@triton.jit
def _sum_kernel(
    made, ids, rows, gate, out, stride_rows, stride_gate,
    SIZE: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up one token's outputs, in the order of its experts."""
    wait(PDL)
    release(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < SIZE
    total = tl.zeros([WIDTH], tl.float32)
    if SHARED:
        total = tl.load(rows + token * stride_rows + column, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            total *= tl.sigmoid(tl.load(gate + token * stride_gate).to(tl.float32))
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        total += tl.load(made + pair * SIZE + column, mask=inside & (tl.load(ids + pair) >= 0), other=0.0)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=inside)
# fmt: on


class Matrices(NamedTuple):
    """Matrices [N, K] of all experts, or two of each, and how a kernel reads them."""

    first: Tensor
    second: Tensor
    levels: Tensor | None
    scales: Tensor | None
    others: Tensor | None
    places: Tensor | None
    how: dict[str, Any]
    rounds: str = ""
    """The kind of bytes that inputs are rounded to; "" = none. Pairs are sorted then."""

    @property
    def num_experts(self) -> int:
        """Return E."""
        return len(self.first if self.places is None else self.places)


def _plain(first: Tensor, second: Tensor, places: Tensor | None = None) -> Matrices:
    how = {"TYPE": "", "IS_GROUP": False, "BLOCK": 1, "NUM_BYTES": 1, "PLACED": places is not None}
    how |= {"ROWS": 0, "GROUPS": 1}
    return Matrices(first, second, None, None, None, places, _strides(first) | how)


def _packed(first: Packed, second: Packed) -> Matrices:
    a, b, name = first.blocks, second.blocks, first.type_name
    if name in PLAIN:
        return _plain(a.view(PLAIN[name]), b.view(PLAIN[name]))
    if first.scales is not None and second.scales is not None:
        plain, scales = _plain(a.view(BYTES[name]), b.view(BYTES[name])), first.scales
        groups = scales.shape[2] if scales.dim() == 3 else 1
        how = plain.how | {"ROWS": a.shape[1] // scales.shape[1], "GROUPS": groups}
        rounds = name if first.input_precision in _ROUNDED else ""
        return plain._replace(scales=scales, others=second.scales, how=how, rounds=rounds)
    assert second.type_name == name and a.stride() == b.stride()
    how = _strides(a) | constants_of(first) | {"K": first.num_inputs, "ROWS": 0, "GROUPS": 1}
    return Matrices(a, b, levels_of(name, a.device), None, None, None, how)


def packed(stacks: Stacks) -> tuple[Matrices, Matrices]:
    """Return gates and values, and what multiplies what they make."""
    gate, up, down = stacks
    return _packed(gate, up), _packed(down, down)


def _strides(matrices: Tensor) -> dict[str, Any]:
    return {"STRIDE": matrices.stride(0), "ROW": matrices.stride(1), "K": matrices.shape[2]}


def dense_experts(
    x: Tensor, routing: Routing, up: Tensor, down: Tensor, form: ExpertForm, shared: Shared | None
) -> Tensor:
    """See experts.DenseExperts."""
    gate, value = up.chunk(2, 1)
    return _sum_up(x, routing, _plain(gate, value), _plain(down, down), form, shared)


def placed_experts(
    x: Tensor,
    routing: Routing,
    up: Tensor,
    down: Tensor,
    form: ExpertForm,
    shared: Shared | None,
    places: Places,
) -> Tensor:
    """See experts.PlacedExperts."""
    gate, value = up.chunk(2, 1)
    matrices = _plain(gate, value, places.up), _plain(down, down, places.down)
    return _sum_up(x, routing, *matrices, form, shared)


def block_experts(
    x: Tensor, routing: Routing, stacks: Stacks, form: ExpertForm, shared: Shared | None
) -> Tensor:
    """See experts.BlockExperts, without changes; weights are unpacked inside the products."""
    return _sum_up(x, routing, *packed(stacks), form, shared)


def arrange_stack(stack: Packed, dtype: torch.dtype) -> Packed:
    """See ExpertKernels.arrange; bytes whose scales serve whole rows, or 128 inputs."""
    count, size = stack.blocks.shape[:2]
    made = None
    if dtype in (torch.bfloat16, torch.float16):
        made = eight_bits.arrange(stack._replace(blocks=stack.blocks.flatten(0, 1)))
    if made is None or made.scales is None:
        return stack
    scales, shared = made.scales, count * size // len(made.scales)
    if size % shared:
        scales = scales.repeat_interleave(shared, 0)
    scales = scales.view(count, -1, *scales.shape[1:])
    return made._replace(blocks=made.blocks.view(count, size, -1), scales=scales)


def _sum_up(
    x: Tensor, routing: Routing, up: Matrices, down: Matrices, form: ExpertForm, shared: Shared | None
) -> Tensor:
    made = multiply_all(x, routing, up, down, form) if len(x) else x
    return add_up(made, routing.ids, shared, x.new_empty((len(x), down.first.shape[1])))


def multiply_all(x: Tensor, routing: Routing, up: Matrices, down: Matrices, form: ExpertForm) -> Tensor:
    """Return what experts make of their tokens, weighed: [T * k, H], float32 if x is not rounded."""
    pairs, tiles = routing.ids.numel(), tiles_of(x, routing.ids, up)
    between = x.new_empty((pairs, up.first.shape[1]))
    kind = x.dtype if down.rounds else torch.float32
    made = x.new_empty((pairs, down.first.shape[1]), dtype=kind)
    multiply(x, routing, tiles, up, form.up_bias, between, UP=True, **kind_of(form))
    multiply(between, routing, tiles, down, form.down_bias, made, UP=False, **kind_of(form))
    return made


def tiles_of(x: Tensor, ids: Tensor, matrices: Matrices) -> Tiles:
    """Return the pairs of these experts in tiles; see `sort_pairs`."""
    how = matrices.how
    kind: dict[str, Any] = {
        "is_packed": bool(how["TYPE"]),
        "has_bytes": how["ROWS"] > 0,
        "rounds": bool(matrices.rounds),
    }
    if _can_copy(matrices):
        kind["many"] = _MANY_COPIED[how["GROUPS"] > 1]
    return sort_pairs(ids, matrices.num_experts, dtype=x.dtype, **kind)


def _can_copy(by: Matrices) -> bool:
    """Return True if `copied_experts` multiplies many: tiles are whole and have one scale of 128 inputs."""
    (_, n, k), how = by.first.shape, by.how
    is_whole = n % 128 == 0 and k % 128 == 0 and by.first.is_contiguous()
    return by.rounds == "F8" and has_gluon() and is_whole and (how["GROUPS"] == 1 or how["ROWS"] % 128 == 0)


def kind_of(form: ExpertForm) -> dict[str, Any]:
    """Return how kernels are compiled for a form."""
    gates = {"KIND": KINDS[form.activation], "LIMIT": form.limit, "ALPHA": form.alpha}
    return gates | {"WEIGHS": form.weighs_inputs}


def multiply(
    x: Tensor, routing: Routing, tiles: Tiles, by: Matrices, bias: Tensor | None, out: Tensor, **kind: Any
) -> None:
    """Compute one of the two products of pairs into the rows of `out`."""
    (ids, weights), (*tensors, how, rounds), size = routing, by, by.first.shape[1]
    own = {"E": by.num_experts, "TOP_K": ids.shape[1], "N": size, "BIASED": bias is not None} | kind | how
    biases = out if bias is None else bias
    if rounds:
        in_groups = how["GROUPS"] > 1
        if tiles.sizes["TILE_M"] == 128 and _can_copy(by) and not kind.get("APART"):
            from octavo.runtime.kernels.triton import copied_experts

            copied_experts.multiply(x, routing, tiles, by, bias, out, **kind)
            return
        rounded = eight_bits.round_inputs(x, rounds, in_groups=in_groups)
        own = {name: own[name] for name in own.keys() - {"TYPE", "IS_GROUP", "BLOCK", "NUM_BYTES", "PLACED"}}
        sizes = shapes(tiles.sizes["TILE_M"], how["K"], kind["UP"], in_groups) | overlapped()
        grid = cdiv(size, sizes["TILE_N"]), tiles.number
        sorted_by = weights, tiles.pairs, tiles.experts
        arranged = by.first, by.second, by.scales, by.others, biases, out
        rounded_kernel[grid](*rounded, *sorted_by, *arranged, len(x), IS_FLOAT=rounds == "F8", **own, **sizes)
        return
    given = x, weights, ids, tiles.pairs, tiles.experts, *tensors, biases, out
    grid = cdiv(size, tiles.sizes["TILE_N"]), tiles.number
    own |= tiles.sizes | {"SORTED": tiles.pairs is not tiles.experts} | overlapped()
    _expert_kernel[grid](*given, len(out), x.stride(0), **own)


def add_up(made: Tensor, ids: Tensor, shared: Shared | None, out: Tensor) -> Tensor:
    """Return the sums of tokens, in `out`."""
    size, top_k = out.shape[1], ids.shape[1]
    rows, gate = shared or (None, None)
    width = min(power_of_2(size), _SUM_WIDTH)
    tensors = made, ids, made if rows is None else rows, made if gate is None else gate, out
    strides = 0 if rows is None else rows.stride(0), 0 if gate is None else gate.stride(0)
    kind = {"SHARED": rows is not None, "GATED": gate is not None}
    grid = len(out), cdiv(size, width)
    if len(out):
        _sum_kernel[grid](*tensors, *strides, SIZE=size, TOP_K=top_k, WIDTH=width, **kind, **overlapped())
    return out
