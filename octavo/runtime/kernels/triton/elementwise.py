"""Kernels of normalisation, activations and what positions say. Arithmetic is float32 whatever is stored."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.attention import Pieces, Ragged
from octavo.runtime.kernels.norms import ResidualUpdate
from octavo.runtime.kernels.triton.launch import cdiv, overlapped, power_of_2, release, wait

KINDS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_ELEMENTS = 2048  # of one program
_FEW_ROWS = 512


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, weight, residual, total, out, num_rows, stride_x, stride_residual, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
    NUM_PARTIALS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise ROWS rows of SIZE; row r of x is head r % HEADS of token r // HEADS, in all NUM_PARTIALS."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    head = row % HEADS * SIZE
    place = (row * SIZE)[:, None] + column[None, :]
    factor = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    wait(PDL)
    value = tl.load(x + (row // HEADS * stride_x + head)[:, None] + column[None, :], mask=inside, other=0.0)
    wide = value.to(tl.float32)
    for index in tl.static_range(1, NUM_PARTIALS):
        wide += tl.load(x + index * num_rows * SIZE + place, mask=inside, other=0.0)
    if ADD:
        offset = (row // HEADS * stride_residual + head)[:, None] + column[None, :]
        wide += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)
    release(PDL)
    tl.store(out + place, (wide * scale[:, None] * factor[None, :]).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See norms.RMSNorm."""
    return _normalise(x, weight, eps, None)[0]


def add_norm(x: ResidualUpdate, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
    """See norms.AddNorm."""
    return _normalise(x, weight, eps, residual)


def _normalise(
    update: ResidualUpdate, weight: Tensor, eps: float, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum, and the sum; without a residual stream, the norm twice."""
    x, num_partials = (update, 1) if isinstance(update, Tensor) else (update.parts[0], len(update.parts))
    out = torch.empty_like(x if residual is None else residual, memory_format=torch.contiguous_format)
    total = out if residual is None else torch.empty_like(out)
    size = x.shape[-1]
    heads = 1 if x.dim() == 2 else x.shape[1]
    num_rows = x.shape[0] * heads
    width = power_of_2(size)
    rows = max(1, min(_ELEMENTS // 2 // width, 16))
    if num_rows:
        tensors = x, weight, x if residual is None else residual, total, out
        numbers = num_rows, x.stride(0), 0 if residual is None else residual.stride(0), eps
        sizes = {"HEADS": heads, "SIZE": size, "WIDTH": width, "ROWS": rows}
        kind = {"ADD": residual is not None, "NUM_PARTIALS": num_partials}
        num_warps = _norm_warps(num_rows, width)
        _rms_norm_kernel[(cdiv(num_rows, rows),)](
            *tensors, *numbers, num_warps=num_warps, **sizes, **kind, **overlapped()
        )
    return out, total


def _norm_warps(num_rows: int, width: int) -> int:
    """Take more threads for a row where there are too few rows to hide what each waits for."""
    warps = 8 if width >= 4096 else 4
    return 2 * warps if num_rows <= _FEW_ROWS and width >= 1024 else warps


@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm_kernel(
    x, residual, weight, bias, out, num_rows, stride_x, stride_residual, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    factor, end = tl.full([WIDTH], 1.0, tl.float32), tl.zeros([WIDTH], tl.float32)
    if WEIGHTED:
        factor = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if BIASED:
        end = tl.load(bias + column, mask=column < SIZE, other=0.0).to(tl.float32)
    wait(PDL)
    wide = tl.load(x + (row * stride_x)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    wide += tl.load(residual + (row * stride_residual)[:, None] + column[None, :], mask=inside, other=0.0)
    off = tl.where(inside, wide - (tl.sum(wide, 1) / SIZE)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(off * off, 1) / SIZE + eps)
    release(PDL)
    value = off * scale[:, None] * factor[None, :] + end[None, :]
    tl.store(out + (row * SIZE)[:, None] + column[None, :], value.to(out.dtype.element_ty), mask=inside)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor:
    """See norms.LayerNorm; the sum is not rounded."""
    if residual is None:
        return functional.layer_norm(x, x.shape[1:], weight, bias, eps)
    num_rows, size = x.shape
    out, width = torch.empty_like(x, memory_format=torch.contiguous_format), power_of_2(size)
    rows = max(1, min(_ELEMENTS // 2 // width, 16))
    if num_rows:
        _layer_norm_kernel[(cdiv(num_rows, rows),)](
            x,
            residual,
            x if weight is None else weight,
            x if bias is None else bias,
            out,
            num_rows,
            x.stride(0),
            residual.stride(0),
            eps,
            SIZE=size,
            WIDTH=width,
            ROWS=rows,
            WEIGHTED=weight is not None,
            BIASED=bias is not None,
            num_warps=_norm_warps(num_rows, width),
            **overlapped(),
        )
    return out


@triton.jit
def act(value, KIND: tl.constexpr):
    """Return an activation, by its number in KINDS."""
    if KIND == 0:
        value = value * tl.sigmoid(value)
    elif KIND == 1:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:  # 1 + tanh(z) = 2 sigmoid(2 z)
        value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    return value


@triton.jit
def _activation_kernel(
    x, out, SIZE, WIDTH: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < SIZE
    source = x + row * SIZE * (2 if GATED else 1) + column
    wait(PDL)
    value = act(tl.load(source, mask=inside, other=0.0).to(tl.float32), KIND)
    if GATED:
        value *= tl.load(source + SIZE, mask=inside, other=0.0).to(tl.float32)
    release(PDL)
    tl.store(out + row * SIZE + column, value.to(out.dtype.element_ty), mask=inside)


def activate(x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
    """See activations.Activate."""
    rows, size = x.shape[0], x.shape[1] // (1 + gated)
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    width = min(power_of_2(size), _ELEMENTS // 2)
    if rows:
        grid, kind = (rows, cdiv(size, width)), KINDS[activation]
        _activation_kernel[grid](x, out, size, WIDTH=width, KIND=kind, GATED=gated, **overlapped())
    return out


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["positions"])
def _rotary_kernel(
    positions, frequencies, cos, sin, num_tokens, factor,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    wait(PDL)
    position = tl.load(positions + row, mask=row < num_tokens, other=0).to(tl.float32)
    frequency = tl.load(frequencies + column, mask=column < SIZE, other=0.0)
    angle = position[:, None] * frequency[None, :]
    place = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    inside = (row < num_tokens)[:, None] & (column < SIZE)[None, :]
    release(PDL)
    tl.store(cos + place, tl.cos(angle) * factor, mask=inside)
    tl.store(sin + place, tl.sin(angle) * factor, mask=inside)


def rotary_tables(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """See attention.RotaryTables."""
    num_tokens, size = len(positions), len(frequencies)
    cos, sin = frequencies.new_empty((2, num_tokens, size))
    width = power_of_2(size)
    rows = max(1, 128 // width)
    if num_tokens:
        given = positions, frequencies, cos, sin, num_tokens, factor
        _rotary_kernel[(cdiv(num_tokens, rows),)](
            *given, SIZE=size, WIDTH=width, ROWS=rows, num_warps=1, **overlapped()
        )
    return cos, sin


@triton.jit(do_not_specialize=["singles", "most", "max_blocks"])
def _cut_kernel(
    cu_q_lens, kv_lens, tables, bounds, lens, own, singles, most, table_stride, max_blocks,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    behind = tl.maximum(place - singles, 0)
    request = tl.where(place < singles, place, singles + behind // most)
    first, end = tl.load(cu_q_lens + request), tl.load(kv_lens + request)
    after = tl.load(cu_q_lens + request + 1)
    begin = tl.maximum(end - (after - first), 0)
    chunk = begin // SIZE + behind % most
    tl.store(bounds + place, first + tl.minimum(tl.maximum(chunk * SIZE - begin, 0), after - first))
    if place == tl.num_programs(0) - 1:
        tl.store(bounds + place + 1, after)
    tl.store(lens + place, tl.maximum(tl.minimum(end - chunk * SIZE, SIZE), tl.minimum(end, 1)))
    column = tl.arange(0, WIDTH)
    source = tables + request.to(tl.int64) * table_stride
    block = tl.load(source + tl.minimum(chunk * BLOCKS + column, max_blocks - 1), mask=column < BLOCKS)
    tl.store(own + place.to(tl.int64) * BLOCKS + column, block, mask=column < BLOCKS)


def cut_chunks(batch: Ragged, block_tables: Tensor, size: int, blocks: int, most: int) -> Pieces:
    """See attention.CutChunks."""
    singles = batch.num_singles
    count = singles + (len(batch.kv_lens) - singles) * most
    pieces = Pieces(*(batch.kv_lens.new_empty(shape) for shape in (count + 1, count, (count, blocks))))
    sizes = singles, most, block_tables.stride(0), block_tables.shape[1]
    given = batch.cu_q_lens, batch.kv_lens, block_tables, *pieces, *sizes
    if not count:
        return pieces._replace(cu_q_lens=batch.cu_q_lens)
    _cut_kernel[(count,)](*given, SIZE=size, BLOCKS=blocks, WIDTH=power_of_2(blocks), num_warps=1)
    return pieces
