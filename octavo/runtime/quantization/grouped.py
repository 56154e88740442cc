"""`Grouped` weights are what every stored format is read as; `pack` lays them out in blocks for the kernels.

Kernels want columns that share a scale beside each other, a multiple of 32 of them. Where a file has them in
another order (act-order), or a rank's part ends within a group, columns are sorted and filled up: `places`
says which input each one takes, and -1 is a gap whose input is 0.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.runtime.kernels.block_types import TYPES_BY_NAME
from octavo.runtime.quantization.blocks import Blocks

Kind = Literal["U2", "U3", "U4", "U8", "S8", "NF4", "FP4", "F8", "MXFP4", "NV4"]
_AT_ONCE = 1 << 20  # weights: what is computed on the way stays small
_BYTES = frozenset({"U8", "S8", "F8"})


@dataclass(frozen=True)
class Grouped:
    """A matrix [N, K]: weight = scale of its group * (code - zero), or * what the code stands for.

    codes:  [N, K] uint8; of S8 and U8 these are int8, U8's from -128 on
    scales: [N, G], of MXFP4 uint8 exponents, of NV4 [N, G, 8] uint8, what blocks begin with
    zeros:  [N, G] or None = none (of U: the middle)
    groups: [K] the group of every input
    """

    kind: Kind
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor


def pack(weights: Grouped, *, pads: bool = True) -> tuple[Blocks, Tensor | None]:
    """Return the weights as blocks, and where in x their columns are (None: as they come).

    pads: a last block of 64 may be filled up
    Raises BadCheckpoint for scales that are no numbers.
    """
    if weights.scales.is_floating_point() and not weights.scales.isfinite().all():
        raise BadCheckpoint("a scale is NaN or infinite: the file is damaged, or was not written to its end")
    weights = _choose(weights)
    largest = 64 if f"{weights.kind}_64" in TYPES_BY_NAME and (pads or len(weights.groups) % 64 == 0) else 32
    places, block = _arrange(weights.groups, largest)
    if block == 32 and weights.kind in ("U2", "U3"):
        weights = replace(weights, kind="U4")
    name = weights.kind if weights.kind in TYPES_BY_NAME else f"{weights.kind}_{block}"
    is_plain = len(places) == len(weights.groups) and bool((places[1:] > places[:-1]).all())
    kind, rows = TYPES_BY_NAME[name], len(weights.codes)
    data = torch.empty((rows, len(places) // block, kind.num_bytes), dtype=torch.uint8)
    group_of_block = weights.groups[places[::block]]
    step = max(1, _AT_ONCE // len(places))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        codes = weights.codes[part].view(torch.uint8)
        if not is_plain:
            codes = codes[:, places.clamp(min=0)]
        body = _body(weights.kind, codes.reshape(len(codes), -1, block))
        data[part, :, : -body.shape[-1]] = _head(weights, part, group_of_block)
        data[part, :, -body.shape[-1] :] = body
    return Blocks(data.flatten(1), kind), None if is_plain else places.int()


def outline(kind: Kind, group: int, rows: int, inputs: int, *, pads: bool = True) -> Blocks:
    """Return blocks without bytes, of the size that `pack` mostly makes of such weights.

    group: inputs that share a scale, below 1 = all
    """
    is_whole = inputs % 64 == 0 or (pads and group < 1)
    block = 64 if f"{kind}_64" in TYPES_BY_NAME and is_whole and max(group, 0) % 64 == 0 else 32
    names = kind, f"{kind}_{block}", f"U4_{block}"
    found = TYPES_BY_NAME[next(name for name in names if name in TYPES_BY_NAME)]
    row_bytes = -(-inputs // found.block) * found.num_bytes
    return Blocks(torch.empty((rows, row_bytes), dtype=torch.uint8, device="meta"), found)


def _choose(weights: Grouped) -> Grouped:
    """Return the weights in the smallest type that holds their scales."""
    kind, zeros = weights.kind, weights.zeros
    if kind not in ("U2", "U3", "U4", "U8"):
        return weights
    middle = 0 if kind == "U8" else 1 << int(kind[1]) - 1
    if zeros is None:
        zeros = torch.full_like(weights.scales, middle)
    is_exact = _is_exact(weights.scales, spares=kind != "U8") and _is_exact(zeros)
    if not is_exact and bool((zeros == zeros.round()).all()):
        return _as_bytes(replace(weights, zeros=zeros))
    if kind == "U8" and bool((zeros == 0).all()):
        return replace(weights, kind="S8", zeros=None)
    return replace(weights, zeros=zeros)


def _as_bytes(weights: Grouped) -> Grouped:
    """Return weights with whole zeros as signed bytes under a float32 scale."""
    assert weights.zeros is not None
    codes = weights.codes.view(torch.int8 if weights.kind == "U8" else torch.uint8).to(torch.int16)
    codes = codes - weights.zeros.to(torch.int16)[:, weights.groups]
    if codes.max() > 127 or codes.min() < -128:
        raise BadCheckpoint("8-bit weights with zero points need scales that float16 holds")
    return replace(weights, kind="S8", codes=codes.to(torch.int8), zeros=None)


def _is_exact(numbers: Tensor, *, spares: bool = False) -> bool:
    """Return True if float16 holds the numbers.

    spares: but for last digits of tiny ones, below a 65,536th of the largest of a row. A dead group has such
    a scale; for its sake a matrix would take twice the memory
    """
    exact = numbers.float()
    lost = (numbers.half().float() - exact).abs()
    if spares:
        is_tiny = exact.abs() < torch.finfo(torch.float16).tiny
        lost[is_tiny & (lost <= 2**-16 * exact.abs().amax(-1, keepdim=True))] = 0
    return not bool(lost.any())


def _arrange(groups: Tensor, block: int) -> tuple[Tensor, int]:
    """Return (the places of columns, how many make a block): in blocks of 64 if that leaves no gaps."""
    order = torch.argsort(groups, stable=True)
    sizes = torch.bincount(groups)
    sizes = sizes[sizes > 0]
    inner = (
        sizes[:-1] if bool((groups[1:] >= groups[:-1]).all()) else sizes
    )  # the last may fill up at the end
    if block == 64 and bool((inner % 64).any()):
        block = 32
    padded = (sizes + block - 1) // block * block
    places = torch.full((int(padded.sum()),), -1)
    starts = torch.cumsum(padded, 0) - padded - (torch.cumsum(sizes, 0) - sizes)
    places[torch.arange(len(groups)) + starts.repeat_interleave(sizes)] = order
    return places, block


def _head(weights: Grouped, rows: slice, groups: Tensor) -> Tensor:
    """Return the bytes that blocks begin with: [rows, blocks, bytes]."""
    scales = weights.scales[rows][:, groups]
    if weights.kind == "NV4":
        return scales
    if weights.kind == "MXFP4":
        return scales[..., None]
    if weights.zeros is None:
        return scales.float().contiguous().view(torch.uint8).view(*scales.shape, 4)
    both = torch.stack([scales.half(), weights.zeros[rows][:, groups].half()], -1)
    return both.view(torch.uint8)


def _body(kind: Kind, codes: Tensor) -> Tensor:
    """Return the codes [rows, blocks, block] as they lie in blocks."""
    if kind in _BYTES:
        return codes
    if kind in ("U2", "U3"):
        quarters = codes.reshape(*codes.shape[:-1], 4, 16)
        low = sum((quarters[..., i, :] & 3) << 2 * i for i in range(4))
        assert isinstance(low, Tensor)
        if kind == "U2":
            return low
        high = (codes >> 2).reshape(*codes.shape[:-1], 8, 8) << torch.arange(8, dtype=torch.uint8)
        return torch.cat([low, high.sum(-1, dtype=torch.uint8)], -1)
    low, high = codes.chunk(2, -1)
    return low | high << 4
