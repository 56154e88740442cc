"""Compares a newly built library with the references: `python -m octavo.runtime.kernels.cpu.proof LIBRARY`.

Run by `build` once per library, in a process of its own: what the compiler makes for this CPU has perhaps
never run anywhere, and an instruction too many must not end the engine. Exit status 0 = all agree.
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from octavo.base.gguf import BlockType
from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.attention import HeadInputs, HeadNorms, Ragged, Rotation, Scores
from octavo.runtime.kernels.block_types import BFLOAT16_TYPES, TYPES
from octavo.runtime.kernels.cpu.library import Library
from octavo.runtime.kernels.cpu.table import table_of
from octavo.runtime.kernels.experts import ExpertForm, Router, Shared, Stacks
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.kernels.recurrent import Conv, Decay, GateForm, Scanned, States
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.table import KernelTable

_TOLERANCE = 1e-4
_K, _N = 512, 37
_ROWS = (1, 3, 17, 64)
_INPUT_PRECISIONS: tuple[InputPrecision, ...] = ("float32", "bfloat16", "int16", "int8")


def disagreements(fast: KernelTable, slow: KernelTable) -> Iterator[str]:
    """Yield names of the ops whose results differ by more than rounding."""
    generator = torch.Generator().manual_seed(0)
    for kind in TYPES.values():
        plain = Packed(_finite_blocks(kind, slow, generator), kind.name)
        weights = slow.linear.block_dequantize(plain)
        if not _agree(fast.linear.block_dequantize(plain), weights, weights.abs()):
            yield f"block_dequantize of {kind.name}"
        for rows, input_precision in product(_ROWS, _INPUT_PRECISIONS):
            x, matrix = torch.randn(rows, _K, generator=generator), Packed(*plain[:2], input_precision)
            is_exact = input_precision == "bfloat16" and not fast.linear.rounds
            reference = slow.linear.block_matmul(x, plain if is_exact else matrix)
            if not _agree(fast.linear.block_matmul(x, matrix), reference, x.abs() @ weights.abs().T):
                yield f"block_matmul of {kind.name}, {input_precision}, {rows} rows"
    yield from _tile_disagreements(fast, slow)
    yield from _gate_disagreements(fast, slow)
    yield from _attention_disagreements(fast, slow)
    yield from _expert_disagreements(fast, slow)
    if not _agree(_recurrences(fast), _recurrences(slow), 10):
        yield "a recurrent layer"
    x, weight = torch.randn(5, 192, generator=generator), torch.rand(192, generator=generator)
    for activation, gated in product(get_args(Activation), (True, False)):
        if not _agree(*(table.activate(x, activation, gated=gated) for table in (fast, slow))):
            yield f"{activation}, gated: {gated}"
    if not all(map(_agree, _norms(fast, x, weight), _norms(slow, x, weight))):
        yield "a norm"
    if not all(map(torch.equal, fast.sampling.choose(x), slow.sampling.choose(x))):
        yield "greedy"
    which, numbers = torch.tensor([4, 0, 3]), torch.tensor([1, 0, 1])
    words = torch.randint(-(2**31), 2**31, (2, 6), generator=generator).int()
    left, right = x.clone(), x.clone()
    fast.sampling.forbid(left, which, numbers, words)
    slow.sampling.forbid(right, which, numbers, words)
    if not torch.equal(left, right):
        yield "forbid"


def _tile_disagreements(fast: KernelTable, slow: KernelTable) -> Iterator[str]:
    """Compare where tiles multiply: many rows, products with a gate, and the greedy output."""
    if fast.linear.gated_block_matmul is None or not fast.linear.rounds:
        return
    generator = torch.Generator().manual_seed(3)
    for kind in TYPES.values():
        if kind.name not in BFLOAT16_TYPES and not (kind.name == "F32" and fast.linear.splits_floats):
            continue
        matrix = Packed(_finite_blocks(kind, slow, generator)[:36], kind.name, "bfloat16")
        weights = slow.linear.block_dequantize(matrix).abs().T
        for rows in (1, 17, 40, 260):
            x = torch.randn(rows, _K, generator=generator)
            whole, reference = (table.linear.block_matmul(x, matrix) for table in (fast, slow))
            gated = fast.linear.gated_block_matmul(x, matrix, "silu")
            same = gated is not None and torch.equal(gated, fast.activate(whole, "silu", gated=True))
            if (activated := fast.linear.activated_block_matmul) is not None:
                made = activated(x, matrix, None, "gelu")
                same = (
                    same and made is not None and torch.equal(made, fast.activate(whole, "gelu", gated=False))
                )
            if not (same and _agree(whole, reference, x.abs() @ weights)):
                yield f"block_matmul or gated_block_matmul of {kind.name}, {rows} rows"
            greedy = fast.linear.block_greedy
            found = None if greedy is None else greedy(x, matrix)
            if found is not None and not all(map(torch.equal, found, fast.sampling.choose(whole))):
                yield f"block_greedy of {kind.name}, {rows} rows"


def _gate_disagreements(fast: KernelTable, slow: KernelTable) -> Iterator[str]:
    """Compare products of floats that end with a gate with those that do not."""
    generator, gated_matmul = torch.Generator().manual_seed(6), fast.linear.gated_block_matmul
    for kind, rows in product([kind for kind in TYPES.values() if kind.block == 1], _ROWS):
        x, matrix = torch.randn(rows, _K, generator=generator), _finite_blocks(kind, slow, generator)[:36]
        gated = gated_matmul and gated_matmul(x, Packed(matrix, kind.name), "silu")
        whole = fast.linear.block_matmul(x, Packed(matrix, kind.name))
        if gated is not None and not torch.equal(gated, fast.activate(whole, "silu", gated=True)):
            yield f"gated_block_matmul of {kind.name}, {rows} rows"


def _attention_disagreements(fast: KernelTable, slow: KernelTable) -> Iterator[str]:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8):
        if not _agree(_attention(fast, dtype), _attention(slow, dtype)):
            yield f"store_kv and paged_attention in {dtype}"
    kinds: dict[InputPrecision, int] = {"float32": 1, "bfloat16": 200}
    for kind, dtype, is_causal in product(kinds, (torch.float32, torch.bfloat16), (True, False)):
        scores = Scores(0.125, input_precision=kind, is_causal=is_causal)
        rounding = kinds[kind] if dtype == torch.bfloat16 else 1
        seen, expected = (_long_attention(table, dtype, scores) for table in (fast, slow))
        if not _agree(seen, expected, rounding):
            yield f"paged_attention of long contexts, {kind} over {dtype}, causal: {is_causal}"


def _expert_disagreements(fast: KernelTable, slow: KernelTable) -> Iterator[str]:
    """Compare choices of every kind, and the experts that one of them takes."""
    generator = torch.Generator().manual_seed(4)
    logits, x = (torch.randn(9, size, generator=generator) for size in (16, 64))
    for router in (Router(3), Router(4, "sigmoid", True, 1e-20, 2.5, 4, 2, 2), Router(2, "logits")):
        ours, theirs = (table.experts.route(logits, None, router) for table in (fast, slow))
        if not (torch.equal(ours.ids, theirs.ids) and _agree(ours.weights, theirs.weights)):
            yield f"route by {router.scores}"
    shapes = (16, 32, 64), (16, 32, 64), (16, 64, 32)
    stacks = Stacks(
        *(Packed((torch.randn(shape, generator=generator) / 8).view(torch.uint8), "F32") for shape in shapes)
    )
    routing, shared = slow.experts.route(logits, None, Router(3)), Shared(x, logits[:, :1])
    given = x, routing, stacks, ExpertForm(), shared
    sums = (table.experts.block_experts(*given) for table in (fast, slow))
    if not _agree(*sums):
        yield "block_experts"


def _recurrences(table: KernelTable) -> Tensor:
    """Convolve, scan by the delta rule and multiply by gates; return results and states."""
    generator, kernels = torch.Generator().manual_seed(5), table.recurrent
    x, gates = (torch.randn(6, 84, generator=generator) for _ in range(2))
    heads, cache = (torch.randn(6, 4, size, generator=generator) for size in (32, 4 * 21 * 32))
    bounds, slots = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([6, 7, 8, 9, 10, 11])
    batch = Ragged(cu_q_lens=bounds, kv_lens=torch.tensor([8], dtype=torch.int32))
    states = States(cache, 0, torch.tensor([[1, 2]], dtype=torch.int32), slots, batch)
    conv = kernels.causal_conv(x, Conv(gates[:4], gates[4], True), states, (gates, x))
    new = Scanned(heads[:, :2], heads[:, 2:], conv.view(6, 4, 21), x[:, :4], gates[:, :4])
    y = kernels.scan(new, Decay(-x[0, :4].exp(), x[1, :4].contiguous()), states).flatten(1)
    return torch.cat([kernels.gate(y, gates, GateForm(gates[5], 1e-5, 2)).flatten(), conv.flatten()])


def _agree(fast: Tensor, slow: Tensor, scale: Tensor | float = 1.0) -> bool:
    """Return True if they differ by no more than a share of `scale`, what the result is a sum of."""
    return bool(((fast - slow).abs() <= _TOLERANCE * scale + 1e-30).all())


def _finite_blocks(kind: BlockType, table: KernelTable, generator: torch.Generator) -> Tensor:
    """Return [_N, row_bytes] of random bits, without blocks that hold infinities."""
    count = _K // kind.block
    blocks = torch.zeros(_N * count, kind.num_bytes, dtype=torch.uint8)
    bad = torch.ones(_N * count, dtype=torch.bool)
    while bad.any():
        size = int(bad.sum()), kind.num_bytes
        blocks[bad] = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        bad = ~(table.linear.block_dequantize(Packed(blocks, kind.name)).abs() < 1e6).all(-1)
    return blocks.reshape(_N, count * kind.num_bytes)


def _norms(table: KernelTable, x: Tensor, weight: Tensor) -> list[Tensor]:
    assert table.norms.sandwich_norm is not None and table.norms.layer_norm is not None
    both = table.norms.sandwich_norm(x, weight, weight, 1e-6, x)
    layer = table.norms.layer_norm(x, weight, weight, 1e-6, x.flip(0))
    return [table.norms.rms_norm(x, weight, 1e-6), layer, *both]


def _attention(table: KernelTable, dtype: torch.dtype) -> Tensor:
    """Attend for three requests, one new token and chunks, over a cache that the table itself has filled."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(12, heads, 80, generator=generator) for heads in (4, 2, 2))
    width = 84 if dtype == torch.int8 else 80  # random scales would not be sane: those are zeros
    cache = torch.randn(9, 2, 4, 2, width, generator=generator).to(dtype) * (dtype != torch.int8)
    tables = torch.tensor([[1, 2, 3], [4, 5, 0], [6, 7, 8]], dtype=torch.int32)
    kv_lens = torch.tensor([9, 5, 11], dtype=torch.int32)
    cu_q_lens = torch.tensor([0, 1, 6, 12], dtype=torch.int32)
    positions = [range(8, 9), range(5), range(5, 11)]
    slots = [int(tables[r, p // 4]) * 4 + p % 4 for r, places in enumerate(positions) for p in places]
    rotation, norms = None, None
    if dtype == torch.float32:  # rounding would make more of a difference
        angles, weights = torch.randn(12, 30, generator=generator), torch.rand(2, 80, generator=generator)
        rotation, norms = Rotation(angles.cos(), angles.sin()), HeadNorms(weights[0], weights[1], 1e-6)
    new, batch = HeadInputs(q, k, v, rotation, norms), Ragged(cu_q_lens=cu_q_lens, kv_lens=kv_lens)
    q = table.attention.store_kv(new, cache, torch.tensor(slots))
    return table.attention.paged_attention(q, cache, tables, batch, Scores(0.1, sliding_window=7))


def _long_attention(table: KernelTable, dtype: torch.dtype, scores: Scores) -> Tensor:
    """Attend for a prompt's end, and one new token each of two requests behind the same 700 others."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(72, 6, 64, generator=generator)
    cache = torch.randn(44, 2, 16, 2, 64, generator=generator).to(dtype)
    tables = torch.arange(44, dtype=torch.int32).repeat(3, 1)
    kv_lens = torch.tensor([700, 701, 703], dtype=torch.int32)
    cu_q_lens = torch.tensor([0, 70, 71, 72], dtype=torch.int32)
    batch = Ragged(cu_q_lens=cu_q_lens, kv_lens=kv_lens)
    return table.attention.paged_attention(q, cache, tables, batch, scores)


def main(arguments: list[str]) -> int:
    """Say on standard error what differs."""
    library = Library(Path(arguments[0]))
    found = list(disagreements(table_of(library, 1), ref_table()))
    for name in found:
        sys.stderr.write(f"{name} differs from its reference\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
