"""Inputs for every op of the kernel table, by op name; fast kernels are compared with references on them."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import product
from typing import Any, get_args

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.attention import HeadInputs, HeadNorms, Ragged, Rotation, Scores
from octavo.runtime.kernels.block_types import GROUP_TYPES, TYPES_BY_NAME
from octavo.runtime.kernels.experts import ExpertForm, Router, Routing, Shared, Stacks
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.recurrent import Conv, Decay, GateForm, Scanned, States
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.sampling import IN_PROMPT, Draws, Limits, Scored, TokenLists, Truncation, Words
from octavo.runtime.kernels.table import KernelTable

BLOCKS = TYPES_BY_NAME
GROUP_NAMES = {kind.name for kind in GROUP_TYPES.values()}
TYPE_NAMES = sorted(BLOCKS)
CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


@dataclass
class Case:
    """One call of an op.

    changed, spoiled: positional arguments that the op changes in place, or may overwrite
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    changed: tuple[int, ...] = ()
    spoiled: tuple[int, ...] = ()
    tolerance: float = 2e-6
    """Largest error, relative to the largest value."""


def make_blocks(type_name: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """[rows, row_bytes] of sane weights: quantized by the `gguf` package, or random bits and small scales."""
    rng = np.random.default_rng(seed)
    kind = BLOCKS[type_name]
    weights = (rng.standard_normal((rows, columns)) * 0.05).astype(np.float32)
    if type_name in GROUP_NAMES:
        return _group_blocks(rng, type_name, rows, columns)
    if type_name in ("Q4_K", "Q5_K", "Q6_K"):  # the package has no quantizer for these
        raw = rng.integers(0, 256, (rows, columns // kind.block, kind.num_bytes), dtype=np.uint8)
        scale = np.frombuffer(np.float16(0.0007).tobytes(), np.uint8)
        places = (208,) if type_name == "Q6_K" else (0, 2)
        for place in places:
            raw[..., place : place + 2] = scale
        return torch.from_numpy(raw.reshape(rows, -1))
    packed = quants.quantize(weights, GGMLQuantizationType[type_name])
    return torch.from_numpy(packed.view(np.uint8).reshape(rows, -1).copy())


def _group_blocks(rng: np.random.Generator, type_name: str, rows: int, columns: int) -> torch.Tensor:
    """Random weights, scales and zero points of octavo's own types; no E4M3 that is no number."""
    kind = BLOCKS[type_name]
    raw = rng.integers(0, 256, (rows * columns // kind.block, kind.num_bytes), dtype=np.uint8)
    scales = (rng.uniform(0.01, 0.02, len(raw)) * (0.1 if "8" in type_name[:2] else 1)).astype(np.float32)
    if type_name.startswith("U"):
        bits = int(type_name[1])
        zeros = rng.integers(0, 2**bits + 1, len(raw)) - (128 if bits == 8 else 0)
        head = np.stack([scales, zeros], 1).astype(np.float16)
    else:
        head = scales[:, None]
    raw[:, :4] = head.view(np.uint8)
    if type_name.startswith("NV4"):
        raw[:, 4:8] &= 63  # factors of up to 1.875
    if type_name.startswith("F8"):
        body = raw[:, 4:]
        body[body & 127 == 127] ^= 1
    return torch.from_numpy(raw.reshape(rows, -1))


@dataclass
class Paged:
    """A filled cache and a ragged batch over it."""

    cache: torch.Tensor
    block_tables: torch.Tensor
    cu_q_lens: torch.Tensor
    kv_lens: torch.Tensor
    q: torch.Tensor

    def args(self, **told: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Ragged]:
        """What paged attention takes before its scores. told: of Ragged."""
        batch = Ragged(cu_q_lens=self.cu_q_lens, kv_lens=self.kv_lens, **told)
        return self.q, self.cache, self.block_tables, batch

    def alone(self, r: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Ragged]:
        """The same of one request."""
        first, last = self.cu_q_lens[r : r + 2].tolist()
        ends = torch.tensor([0, last - first], dtype=torch.int32)
        batch = Ragged(cu_q_lens=ends, kv_lens=self.kv_lens[r : r + 1])
        return self.q[first:last], self.cache, self.block_tables[r : r + 1], batch

    def to(self, device: str) -> "Paged":
        return Paged(*(getattr(self, field.name).to(device) for field in fields(self)))

    def in_chunks(self, chunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Ragged]:
        """The same queries, but every request cut into several of at most `chunk` queries."""
        tables, starts, kv_lens = [], [0], []
        for r, kv_len in enumerate(self.kv_lens.tolist()):
            begin, end = self.cu_q_lens[r : r + 2].tolist()
            for first in range(begin, end, chunk):
                last = min(end, first + chunk)
                tables.append(self.block_tables[r])
                starts.append(last)
                kv_lens.append(kv_len - end + last)
        ends, lens = (torch.tensor(numbers, dtype=torch.int32) for numbers in (starts, kv_lens))
        return self.q, self.cache, torch.stack(tables), Ragged(cu_q_lens=ends, kv_lens=lens)


def to_cache(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A cache that holds these keys and values, [num_blocks, 2, block_size, kv_heads, head_dim]."""
    if dtype != torch.int8:
        return vectors.to(dtype)
    num_blocks, _, block_size, kv_heads, head_dim = vectors.shape
    scales = vectors.abs().amax(-1) / 127
    steps = (vectors / scales[..., None]).nan_to_num(0.0).round().to(torch.int8)
    behind = scales.transpose(2, 3).contiguous().view(torch.int8)
    halves = torch.cat([steps.flatten(2), behind.flatten(2)], 2)
    return halves.view(num_blocks, 2, block_size, kv_heads, head_dim + 4)


def make_paged(
    lens: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
) -> Paged:
    """lens: (q_len, kv_len) per request. What no query may see is not-a-number; its blocks do not exist."""
    generator = torch.Generator().manual_seed(heads * 1000 + head_dim)
    num_blocks = 1 + sum(-(-kv // block_size) for _, kv in lens)
    cache = torch.full((num_blocks, 2, block_size, kv_heads, head_dim), float("nan"))
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = torch.full(
        (len(lens), max(-(-kv // block_size) for _, kv in lens) + 2), 1 << 30, dtype=torch.int32
    )
    for r, (q_len, kv_len) in enumerate(lens):
        oldest = max(0, kv_len - q_len - window + 1) if window else 0
        for position in range(oldest, kv_len):
            index, offset = divmod(position, block_size)
            if tables[r, index] == 1 << 30:
                tables[r, index] = order.pop()
            cache[tables[r, index], :, offset] = torch.randn((2, kv_heads, head_dim), generator=generator)
    q_lens = torch.tensor([0] + [q for q, _ in lens])
    fused = torch.randn((int(q_lens.sum()), heads + 3, head_dim), generator=generator)
    return Paged(
        to_cache(cache, dtype),
        tables,
        q_lens.cumsum(0).to(torch.int32),
        torch.tensor([kv for _, kv in lens], dtype=torch.int32),
        fused[:, 2 : heads + 2],  # a slice, as out of a fused projection
    )


_RAGGED = [(1, 1), (1, 33), (5, 5), (1, 300), (40, 40), (7, 64), (16, 97), (3, 31), (2, 32)]


def _attention() -> Iterator[Case]:
    shapes = [
        (1, 1, 32, 16),
        (9, 3, 64, 16),
        (8, 1, 96, 4),
        (4, 4, 80, 64),
        (9, 1, 128, 8),
        (4, 1, 256, 16),
        (6, 2, 36, 5),
    ]
    for heads, kv_heads, head_dim, block_size in shapes:
        for dtype in CACHE_DTYPES:
            for window, cap in ((0, 0.0), (3, 0.0), (40, 30.0)):
                paged = make_paged(
                    _RAGGED,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=head_dim,
                    block_size=block_size,
                    dtype=dtype,
                    window=window,
                )
                yield Case(
                    f"{heads}x{kv_heads}x{head_dim} blocks of {block_size} {dtype} window {window} cap {cap}",
                    (*paged.args(), Scores(head_dim**-0.5, window, cap)),
                )
                yield Case(
                    f"to both sides {heads}x{kv_heads}x{head_dim} {dtype} window {window} cap {cap}",
                    (*paged.args(), Scores(head_dim**-0.5, window, cap, is_causal=False)),
                )
    yield from _sinks()
    yield from _latent_attention()


def _sinks() -> Iterator[Case]:
    """Some far above all scores, some far below."""
    sinks = torch.tensor([3.0, -100.0, 0.5, 100.0, -1.0, 2.0, 0.0, 1.0])
    for dtype, window, size in product(CACHE_DTYPES, (0, 40), (16, 64)):
        for lens in (_RAGGED, [(1, 1), (1, 700), (1, 128), (1, 33)]):
            shape = {"heads": 8, "kv_heads": 2, "head_dim": size, "block_size": 16, "window": window}
            paged = make_paged(lens, **shape, dtype=dtype)
            name = f"sinks heads of {size} {dtype} window {window}, {len(lens)} requests"
            yield Case(name, (*paged.args(), Scores(size**-0.5, window, sinks=sinks)))


def make_latent(
    lens: list[tuple[int, int]],
    *,
    heads: int,
    size: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
) -> Paged:
    """The same of a cache that keeps one vector per token."""
    paged = make_paged(lens, heads=heads, kv_heads=1, head_dim=size, block_size=block_size)
    paged.cache = paged.cache[:, :1].to(dtype).contiguous()
    return paged


def _latent_attention() -> Iterator[Case]:
    """Heads that fill a tile, and do not; parts of any size; without a part for keys alone."""
    shapes = [(16, 32, 128, 16), (4, 8, 40, 4), (20, 64, 512, 64), (3, 0, 36, 5), (70, 16, 64, 32)]
    for heads, keys_only, latent, block_size in shapes:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            size = keys_only + latent
            for kind, lens in (("mixed", _RAGGED[:5]), ("single", [(1, 1), (1, 300), (1, 128), (1, 33)])):
                paged = make_latent(lens, heads=heads, size=size, block_size=block_size, dtype=dtype)
                yield Case(
                    f"latent {kind} {heads}x{keys_only}+{latent} blocks of {block_size} {dtype}",
                    (*paged.args(), Scores(size**-0.5, keys_only=keys_only)),
                )


def _store_kv() -> Iterator[Case]:
    for dtype in CACHE_DTYPES:
        for heads, kv_heads, head_dim, block_size in ((3, 3, 64, 16), (5, 1, 36, 5), (4, 2, 256, 64)):
            yield _to_store(heads, kv_heads, head_dim, block_size, dtype, tolerance=0)
    for heads, kv_heads, head_dim, half in (
        (9, 3, 64, 32),
        (2, 1, 80, 20),
        (2, 2, 6, 3),
        (4, 1, 256, 128),
        (16, 8, 128, 64),
    ):
        for interleaved in (False, True):
            for normed in (False, True):
                angles = torch.randn(9, half) * 100
                yield _to_store(
                    heads,
                    kv_heads,
                    head_dim,
                    16,
                    rotation=Rotation(angles.cos(), angles.sin(), interleaved),
                    norms=HeadNorms(torch.randn(head_dim), torch.randn(head_dim), 1e-6) if normed else None,
                )
    norms = HeadNorms(torch.randn(64), torch.randn(64), 1e-5)
    yield _to_store(3, 1, 64, 16, norms=norms)
    for half, late, scaled in ((32, True, False), (20, True, True), (32, False, True), (0, False, True)):
        angles = torch.randn(9, half) * 100
        turn = Rotation(angles.cos(), angles.sin()) if half else None
        norms = HeadNorms(torch.randn(64), torch.randn(64), 1e-5, late) if half else None
        case = _to_store(6, 2, 64, 16, rotation=turn, norms=norms)
        factors = torch.rand(9) + 0.5 if scaled else None
        case.args = case.args[0]._replace(q_factors=factors), *case.args[1:]
        yield replace(case, name=f"{case.name} late: {late} scaled: {scaled}")
    for dtype in (torch.float32, torch.bfloat16):
        for heads, half, latent, interleaved in ((16, 32, 512, True), (5, 4, 40, False), (130, 3, 12, True)):
            angles, size = torch.randn(9, half) * 100, 2 * half + latent
            case = _to_store(
                heads,
                1,
                size,
                16,
                rotation=Rotation(angles.cos(), angles.sin(), interleaved),
                norms=HeadNorms(None, torch.randn(latent), 1e-6),
                tolerance=2e-6 if dtype == torch.float32 else 2**-8,
            )
            new, cache, slots = case.args
            case.args = new, cache[:, :1].to(dtype).contiguous(), slots
            yield replace(case, name=f"latent {case.name} {dtype}")


def _to_store(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    *,
    rotation: Rotation | None = None,
    norms: HeadNorms | None = None,
    tolerance: float = 2e-6,
) -> Case:
    """Nine tokens, some of which are not to be kept."""
    fused = torch.randn(9, heads + 2 * kv_heads + 1, head_dim)
    cache = to_cache(torch.randn(4, 2, block_size, kv_heads, head_dim), dtype)
    slots = torch.tensor([0, -1, block_size - 1, block_size, -1, 3 * block_size + 2, 2 * block_size, 1, -1])
    q, k, v, _ = fused.split((heads, kv_heads, kv_heads, 1), dim=1)
    if rotation is None and norms is None:
        k[0, 0, :4] = torch.tensor([float("inf"), -0.0, 1e-40, 7e4])
    return Case(
        f"{heads}x{kv_heads}x{head_dim} {dtype} {rotation is not None} {norms is not None}",
        (HeadInputs(q, k, v, rotation, norms), cache, slots),
        changed=(1,),
        spoiled=(0,),
        tolerance=tolerance,
    )


def _rms_norm() -> Iterator[Case]:
    for tokens, size in ((1, 576), (3, 7), (70, 640), (1, 1)):
        x, weight = torch.randn(tokens, 2 * size), torch.randn(size)
        yield Case(f"{tokens}x{size}", (x[:, :size], weight, 1e-6))
    x = torch.randn(5, 12, 64)
    yield Case("heads", (x[:, 2:7], torch.randn(64), 1e-6))


def _add_norm() -> Iterator[Case]:
    for tokens, size in ((1, 576), (3, 7), (70, 640), (1, 1)):
        x, residual, weight = torch.randn(tokens, 2 * size), torch.randn(tokens, size), torch.randn(size)
        yield Case(f"{tokens}x{size}", (x[:, size:], weight, 1e-5, residual))


def _layer_norm() -> Iterator[Case]:
    for tokens, size in ((1, 384), (3, 7), (70, 640), (1, 1)):
        x, residual, ends = torch.randn(tokens, 2 * size), 9 + torch.randn(tokens, size), torch.randn(2, size)
        weight, bias = ends if tokens > 1 else (None, None)
        yield Case(f"{tokens}x{size}", (x[:, size:], weight, bias, 1e-5, residual), tolerance=2e-5)
        yield Case(f"{tokens}x{size} alone", (x[:, size:], weight, bias, 1e-5), tolerance=2e-5)


def _activate() -> Iterator[Case]:
    for activation, gated in product(get_args(Activation), (True, False)):
        for tokens, size in ((1, 1536), (3, 7), (40, 2048)):
            x = torch.randn(tokens, size * (1 + gated)) * 5
            x[0, :3] = torch.tensor([-100.0, 100.0, 0.0])
            yield Case(f"{activation} {tokens}x{size} {gated}", (x, activation), {"gated": gated})


def _xielu() -> Iterator[Case]:
    for alphas in ((0.5, -0.3), (30.0, 2.0)):
        learned = [torch.tensor([value]) for value in (*alphas, 0.5, -1e-6)]
        for tokens, size in ((1, 1536), (3, 7), (40, 2048)):
            x = torch.randn(tokens, size * 2)[:, size:] * 5
            x[0, :3] = torch.tensor([-100.0, 100.0, 0.0])
            yield Case(f"{alphas} {tokens}x{size}", (x, learned))


def _dequantize() -> Iterator[Case]:
    for name in TYPE_NAMES:
        matrix, places = Packed(make_blocks(name, 5, 512), name), torch.tensor([3, 0, 4, 3])
        yield Case(name, (matrix,), tolerance=1e-7)
        yield Case(f"{name} rows", (matrix, places), tolerance=1e-7)
        yield Case(f"{name} rows, scaled", (matrix, places, 25.298), tolerance=1e-7)


def _rotary_tables() -> Iterator[Case]:
    for half, factor in ((32, 1.0), (3, 1.19)):
        frequencies = 10000.0 ** -(torch.arange(half) / half)
        yield Case(f"{half}", (torch.tensor([0, 1, 777, 131071, 5]), frequencies, factor), tolerance=3e-7)


def _cut_chunks() -> Iterator[Case]:
    """Singles at both ends of chunks, of no keys, of the last block; prompts across chunks."""
    tables = torch.randperm(7 * 24).int().view(7, 24)
    for lengths, ends, size, blocks in (
        ([1, 1, 1, 1, 1], [1, 8, 9, 0, 96], 8, 2),
        ([1, 1, 7, 16, 30, 3], [17, 16, 7, 21, 90, 48], 16, 4),
        ([40], [43], 12, 3),
    ):
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        singles = next((i for i, length in enumerate(lengths) if length > 1), len(lengths))
        batch = Ragged(cu_q_lens=bounds, kv_lens=torch.tensor(ends).int(), num_singles=singles)
        most = (max(lengths) + size - 2) // size + 1
        yield Case(f"{lengths}", (batch, tables[: len(ends)], size, blocks, most), tolerance=0)


def _distance_attention() -> Iterator[Case]:
    for dtype, size in product((torch.float32, torch.bfloat16, torch.float16), (64, 20)):
        paged = make_paged(_RAGGED, heads=4, kv_heads=2, head_dim=size, block_size=5, dtype=dtype)
        for count in (129, 7):
            name = f"heads of {size} {dtype} {count} terms"
            yield Case(name, (*paged.args(), torch.randn(count, 8)[:, 2:6] * 3, 0.3))


def _matmul() -> Iterator[Case]:
    for name in TYPE_NAMES:
        for m, n, k in ((1, 30, 512), (2, 7, 256), (6, 97, 768), (33, 64, 256)):
            x = torch.randn(m, k + 5)[:, :k]
            yield Case(f"{name} {m}x{n}x{k}", (x, Packed(make_blocks(name, n, k), name), torch.randn(n)))
    for name in ("F32", "F16", "BF16"):
        for m in (1, 5):
            yield Case(f"{name} odd {m}", (torch.randn(m, 75), Packed(make_blocks(name, 11, 75), name)))


def _select_inputs() -> Iterator[Case]:
    for rows, size, count in ((1, 48, 64), (7, 576, 640), (40, 5, 3)):
        places = torch.randint(-1, size, (count,), dtype=torch.int32)
        yield Case(f"{rows}x{size} to {count}", (torch.randn(rows, size + 3)[:, :size], places), tolerance=0)


def _join() -> Iterator[Case]:
    for rows, sizes in ((1, (48, 64)), (7, (576, 576, 3)), (40, (5,))):
        parts = tuple(torch.randn(rows, size + 3)[:, :size] for size in sizes)
        yield Case(f"{rows}x{sizes}", parts, tolerance=0)


def _gated_matmul() -> Iterator[Case]:
    for case in _dense_matmul():
        x, weight, *bias = case.args
        case.args = (x, torch.cat([weight.flip(0), weight]), *(torch.cat([b, -b]) for b in bias))
        yield case


def _dense_matmul() -> Iterator[Case]:
    for m, n, k in ((1, 30, 512), (2, 7, 70), (3, 65, 192), (17, 97, 768), (33, 64, 256)):
        x, weight = torch.randn(m, k + 5)[:, :k], torch.randn(n, k)
        yield Case(f"{m}x{n}x{k}", (x, weight))
        yield Case(f"{m}x{n}x{k} bias", (x, weight, torch.randn(n)))


def _draw() -> Iterator[Case]:
    for n, size in ((1, 151), (3, 5000), (6, 4096)):
        logits = torch.randn(n, size) * 3
        logits[0, 7] = logits[0, 9] = logits[0].max() + 1  # of equal ones the first
        temperature = torch.rand(n, dtype=torch.float64) * (torch.arange(n) % 3 > 0)
        noise = torch.rand(n, dtype=torch.float64)
        yield Case(f"{n}x{size} greedy", (logits,))
        yield Case(f"{n}x{size} mixed", (logits, Draws(temperature, noise)))
        yield Case(f"{n}x{size} narrow", (logits.bfloat16(), Draws(temperature, noise)))
        values = logits.sort(dim=1).values[:, -40].contiguous()
        ids = torch.full((n,), size // 2, dtype=torch.int32)
        draws = Draws(temperature + 0.5, noise)
        yield Case(f"{n}x{size} truncated", (logits, draws, Truncation(values, ids)))
    noise = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for temperature in (1e-5, 1.0, 50.0):
        degrees = torch.full((2,), temperature, dtype=torch.float64)
        yield Case(f"ends {temperature}", (torch.randn(2, 9000), Draws(degrees, noise)))


def _row_limits() -> Iterator[Case]:
    """Any 64 bits are a seed."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (30, 1))
    limits = torch.randn(30, 5, dtype=torch.float64)
    for rows in (1, 20, 150):
        places, positions = torch.randint(0, 30, (rows,)), torch.randint(0, 10**6, (rows,))
        yield Case(f"{rows}", (places, positions, seeds, limits), tolerance=0.0)


def _forbid() -> Iterator[Case]:
    """Rows in any order, masks that rows share; the last word of a mask has bits of no token."""
    for n, size in ((1, 31), (3, 5000), (5, 4096)):
        words = torch.randint(-(2**31), 2**31 - 1, (2, -(-size // 32)), dtype=torch.int32)
        for m in {1, n - n // 2, n}:
            rows, numbers = torch.randperm(n)[:m], torch.randint(0, 2, (m,))
            yield Case(f"{m} of {n}x{size}", (torch.randn(n, size), rows, numbers, words), changed=(0,))


def _widen() -> Iterator[Case]:
    wide = torch.randn(5, 9000)
    for logits in (wide, wide.bfloat16(), wide.half()[:, :5001], wide.bfloat16()[:1, 8:]):
        yield Case(f"{logits.dtype} {tuple(logits.shape)}", (logits,), tolerance=0.0)


def _ban() -> Iterator[Case]:
    """Words that have begun, and others; beginnings of outputs; words that share their last token."""
    for n, size, num_words in ((1, 31, 2), (4, 900, 200)):
        ids = torch.randint(0, 3, (n + 1, 12))
        lengths = torch.randint(0, 12, (n + 2,))
        owners, lists = (torch.randint(0, n, (num_words,)) for _ in range(2))
        prefixes = torch.randint(-1, 3, (num_words, 3))
        prefixes[:, 1:].masked_fill_(prefixes[:, :-1] < 0, -1)
        last, rows = torch.randint(0, min(size, 40), (num_words,)), torch.randint(0, n, (num_words,))
        words = Words(rows, last, prefixes, owners, lists)
        args = (torch.randn(n, size), words, ids, lengths)
        yield Case(f"{n}x{size}", args, changed=(0,))
    one = Words(rows[:1], last[:1], prefixes[:1, :0], owners[:1], lists[:1])
    args = (torch.randn(4, 50), one, ids, lengths)
    yield Case("no prefixes", args, changed=(0,))


def _penalize() -> Iterator[Case]:
    """Tokens of prompt and output; entries that are none, and what a former owner has left."""
    for n, size, longest in ((1, 31, 5), (3, 5000, 40), (4, 900, 700)):
        counts = torch.zeros(n + 2, size, dtype=torch.int32)
        ids = torch.randint(0, size, (n + 2, longest + 9))
        lengths = torch.randint(1, longest, (n,))
        lengths[0] = longest
        rows, owners = torch.randperm(n + 1)[:n], torch.randperm(n + 2)[:n]
        for owner, length in zip(owners.tolist(), lengths.tolist(), strict=True):
            tokens = torch.randperm(size)[:length]
            ids[owner, :length] = tokens
            counts[owner, tokens] = torch.randint(0, 4, (length,), dtype=torch.int32)
            counts[owner, tokens[::2]] += IN_PROMPT
            counts[owner, tokens[-1]] = 0  # said to be none
            ids[owner, length - 1] = -1
        strengths = torch.tensor([[1.3, 0.5, -0.7], [0.8, 0.0, 0.4], [1.0, -0.2, 0.0], [1.1, 0.0, 0.0]])
        lists = TokenLists(owners, lengths, ids, counts, longest)
        args = (torch.randn(n + 1, size), rows, lists, torch.randperm(4)[:n], strengths)
        yield Case(f"{n}x{size}", args, changed=(0,))


def _count() -> Iterator[Case]:
    """Tokens that occur and others, at the ends of lists."""
    for n, size in ((1, 31), (3, 5000), (70, 900)):
        counts = torch.randint(0, 2, (n + 2, size), dtype=torch.int32)
        ids, owners = torch.randint(0, size, (n + 2, 9)), torch.randperm(n + 2)[:n]
        lists = TokenLists(owners, torch.randint(0, 9, (n,)), ids, counts, 8)
        yield Case(f"{n}x{size}", (lists, torch.randint(0, size, (n,))), changed=(0,))


def _score() -> Iterator[Case]:
    """Equal logits, rows with tokens that are impossible, narrow types; more than a kernel keeps."""
    for size, top, options in (
        (31, 3, {}),
        (9000, 5, {}),
        (9000, 0, {}),
        (5000, 40, {}),
        (4097, 20, {"dtype": torch.bfloat16}),
        (300, -1, {}),
        (700, 4, {"listed": True}),
    ):
        logits = (torch.randn(4, size) * 3).to(options.get("dtype", torch.float32))
        if size == 9000:
            logits[1, 7] = logits[1, 8500] = 20.0
            logits[2, 8:] = float("-inf")
        rows, token_ids = torch.tensor([2, 0, 1]), torch.randint(0, size, (3,))
        token_ids[0] %= 3
        listed = torch.randint(0, size, (3, top)) if "listed" in options else None
        for normalise in (True, False):
            args = (logits, Scored(rows, token_ids, top, normalise, listed))
            yield Case(f"{size} top {top} {normalise}", args, tolerance=2e-6)


def _truncate() -> Iterator[Case]:
    """Ends among many equal logits, near and deep; compared by the tokens that are kept."""
    for size, spread in ((151, 3.0), (9000, 3.0), (4500, 0.1)):
        options = [(0, 1.0, 0.0), (1, 1.0, 0.0), (40, 1.0, 0.0), (700, 1.0, 0.0), (0, 0.3, 0.0)]
        options += [(0, 0.9, 0.0), (0, 0.999, 0.0), (0, 1.0, 0.1), (50, 0.8, 0.05), (10**6, 0.5, 1e-6)]
        top_k, top_p, min_p = (
            torch.tensor(column, dtype=torch.float64) for column in zip(*options, strict=True)
        )
        logits = (torch.randn(len(options), size) * spread).bfloat16()
        temperature = 0.4 + torch.rand(len(options), dtype=torch.float64)
        for kind in (torch.bfloat16, torch.float32):
            yield Case(f"{size} {spread} {kind}", (logits.to(kind), Limits(temperature, top_k, top_p, min_p)))


def _route() -> Iterator[Case]:
    for tokens, count, router in (
        (5, 8, Router(2)),
        (7, 60, Router(4, normalises=True)),
        (3, 16, Router(3, "logits", factor=2.5)),
        (40, 64, Router(6, num_groups=8, top_groups=3)),
        (9, 512, Router(16, "sigmoid", True, 1e-20, 2.5, 8, 4, 2)),
    ):
        logits, bias = torch.randn(tokens, count + 1)[:, :count] * 2, torch.randn(count)
        yield Case(f"{tokens} {router}", (logits, bias if router.scores == "sigmoid" else None, router))
    yield Case("equal scores", (torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0] * 4]), None, Router(2)))


def _routing(tokens: int, count: int, top_k: int, chosen: int | None = None) -> Routing:
    """Random experts of each token, `chosen` among them."""
    order = torch.rand(tokens, count).argsort(1)
    if chosen is not None:
        order = torch.cat([torch.full((tokens, 1), chosen), order[:, : top_k - 1] % chosen], 1)
    return Routing(order[:, :top_k].int().contiguous(), torch.rand(tokens, top_k))


def _expert_calls() -> Iterator[tuple[str, Any, tuple[int, int, int], tuple[Any, ...]]]:
    """Name, (inputs, routing), sizes E, I and H, and what comes behind the matrices."""
    calls = [(1, 8, 48, 64, 2), (70, 5, 32, 96, 3), (33, 40, 32, 64, 1), (3, 4, 160, 32, 4)]
    for tokens, count, inner, size, top_k in calls:
        x = torch.randn(tokens, size + 3)[:, :size]
        shared = None if tokens == 1 else Shared(torch.randn(tokens, size), None)
        if tokens == 70:
            shared = Shared(torch.randn(tokens, size), torch.randn(tokens, 1))
        biases = (torch.randn(count, 2 * inner), torch.randn(count, size)) if tokens == 3 else (None, None)
        clamp = (0.7, 1.7) if tokens == 3 else ()
        form = ExpertForm("gelu" if tokens == 33 else "silu", tokens == 33, *biases, *clamp)
        given = x, _routing(tokens, count, top_k, count - 1 if tokens == 70 and top_k == 1 else None)
        yield f"{tokens} of {count}x{inner}x{size}", given, (count, inner, size), (form, shared)


def _dense_experts() -> Iterator[Case]:
    for name, given, (count, inner, size), rest in _expert_calls():
        up, down = torch.randn(count, 2 * inner, size) * 0.1, torch.randn(count, size, inner) * 0.1
        yield Case(name, (*given, up, down, *rest))


def _block_experts() -> Iterator[Case]:
    for kind in ("F32", "BF16", "Q8_0", "Q4_1", "MXFP4", "U4_32"):
        for name, given, (count, inner, size), rest in _expert_calls():
            if inner % 32 and kind not in ("F32", "BF16"):
                continue
            shapes = (inner, size), (inner, size), (size, inner)
            stacks = (
                Packed(make_blocks(kind, count * rows, columns, rows).view(count, rows, -1), kind)
                for rows, columns in shapes
            )
            yield Case(f"{kind} {name}", (*given, Stacks(*stacks), *rest))


def _states(numbers: int, offset: int = 3) -> States:
    """Of a decoding request, one that begins, one in the middle of a chunk over three blocks, and padding."""
    cache = torch.randn(12, 1, numbers + offset).expand(-1, 4, -1)
    tables = torch.tensor([[1, 2, 0], [3, 0, 0], [5, 6, 7], [0, 0, 0]], dtype=torch.int32)
    places = [(2, 1), (3, 0), (3, 1), *((b, p) for b in (5, 6, 7) for p in range(4))][:12]
    slots = torch.tensor([4 * block + place for block, place in places] + [-1])
    bounds, lens = torch.tensor([0, 1, 3, 12, 13]), torch.tensor([6, 2, 10, 1])
    batch = Ragged(cu_q_lens=bounds.int(), kv_lens=lens.int(), num_singles=1)
    return States(cache, offset, tables, slots, batch)


def _decoding(states: States) -> States:
    """The same memory, and a token for each of three requests: behind a full block, in one, the first."""
    bounds, lens = torch.arange(4), torch.tensor([5, 7, 1])
    batch = Ragged(cu_q_lens=bounds.int(), kv_lens=lens.int(), num_singles=3)
    slots = torch.tensor([2 * 4, 6 * 4 + 2, 3 * 4])
    tables = torch.tensor([[1, 2], [5, 6], [3, 0]], dtype=torch.int32)
    return states._replace(slots=slots, block_tables=tables, batch=batch)


DRAFTS = 3
"""Of a request in one step."""


def _verifying(numbers: int, kept: int, rows: int) -> States:
    """Requests with states that some drafts have yet to pass, and with drafts behind their tokens.

    The first and the last have none, the first begins a block, the second a text. numbers: of all that is
    kept; kept: of the states; rows: of which each says how many tokens it has passed
    """
    size, ends = 16, ([33], [1, 2], [8, 9, 10, 11], [15], [21, 22], [12])
    tables = torch.tensor(
        [[3 * i + 1 + j for j in range(3)] for i, rows in enumerate(ends) for _ in rows]
    ).int()
    lens = torch.tensor([end for rows in ends for end in rows]).int()
    cache = torch.randn(19, 1, numbers + 3)
    for rows_of, behind in zip(ends, (0, 0, 3, 1, 2, 0), strict=True):
        request = ends.index(rows_of)
        block = 3 * request + 1 + max(rows_of[0] - 2, 0) // size
        cache[block, 0, 3 + kept : 3 + kept + rows] = rows_of[0] - 1 - behind
    slots = tables.gather(1, ((lens - 1) // size).long()[:, None])[:, 0].long() * size + (lens - 1) % size
    bounds = torch.arange(len(lens) + 1).int()
    batch = Ragged(cu_q_lens=bounds, kv_lens=lens, num_singles=len(lens))
    return States(cache.expand(-1, size, -1), 3, tables, slots, batch, DRAFTS)


def _causal_conv() -> Iterator[Case]:
    for taps, channels, is_gated in product((2, 4, 8), (16, 83), (False, True)):
        wide = torch.randn(13, 3 * channels + 1)[:, 1:]
        before, behind, x = wide.chunk(3, 1)
        weight, bias = torch.randn(taps, channels), None if is_gated else torch.randn(channels)
        states = _states((taps - 1) * channels)
        factors = (before, behind) if is_gated else None
        yield Case(
            f"{taps} {channels} {is_gated}",
            (x, Conv(weight, bias, not is_gated), states, factors),
            changed=(2,),
        )
        x, states = x[:3], _decoding(states)
        factors = (before[:3], behind[:3]) if is_gated else None
        given = x, Conv(weight, bias, not is_gated), states, factors
        yield Case(f"{taps} {channels} {is_gated} decoding", given, changed=(2,))
        x, conv = wide[:11].chunk(3, 1)[2], given[1]
        states = _verifying(conv.num_inputs(DRAFTS) * channels, 0, 0)
        factors = tuple(wide[:11].chunk(3, 1)[:2]) if is_gated else None
        yield Case(f"{taps} {channels} {is_gated} drafts", (x, conv, states, factors), changed=(2,))


def scans(shapes: Sequence[tuple[int, ...]]) -> Iterator[Case]:
    """Yield scans of groups of some size, and heads of some rows."""
    for (groups, size, heads, rows), is_delta in product(shapes, (False, True)):
        keys, values = groups * size, heads * rows
        wide = torch.randn(13, 2 * keys + values + 2 * heads)
        queries, key, value, steps, strengths = wide.split([keys, keys, values, heads, heads], 1)
        queries, key = (part.view(13, groups, size) for part in (queries, key))
        new = Scanned(queries, key, value.view(13, heads, rows), steps, strengths if is_delta else None)
        skip = None if is_delta else torch.randn(heads)
        limits = (0.1, 0.9) if size == 48 else (0.0, math.inf)
        decay = Decay(-torch.randn(heads).exp(), torch.randn(heads), skip, limits)
        name = f"{groups} {size} {heads} {rows} {is_delta}"
        yield Case(name, (new, decay, states := _states(values * size)), changed=(2,), tolerance=1e-5)
        first = Scanned(*(None if part is None else part[:3] for part in new))
        yield Case(f"{name} decoding", (first, decay, _decoding(states)), changed=(2,), tolerance=1e-5)
        first = Scanned(*(None if part is None else part[:11] for part in new))
        logged = (2 * DRAFTS + 1) * (keys + values + heads * (1 + is_delta))
        states = _verifying(values * (size + 1) + logged, values * size, values)
        yield Case(f"{name} drafts", (first, decay, states), changed=(2,), tolerance=1e-5)


def _gate() -> Iterator[Case]:
    x, gates, weight = torch.randn(7, 100)[:, 4:], torch.randn(7, 99)[:, 3:], torch.randn(96)
    for form in (
        GateForm(),
        GateForm(sigmoid=True),
        GateForm(weight, 1e-5),
        GateForm(weight, 1e-5, 4),
        GateForm(weight[:24], 1e-5, norm_first=True),
        GateForm(weight[:48], 1e-5, 2, sigmoid=True),
    ):
        yield Case(f"{form[1:]}", (x, gates, form))


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "store_kv": _store_kv,
    "paged_attention": _attention,
    "rms_norm": _rms_norm,
    "rotary_tables": _rotary_tables,
    "cut_chunks": _cut_chunks,
    "distance_attention": _distance_attention,
    "add_norm": _add_norm,
    "layer_norm": _layer_norm,
    "activate": _activate,
    "xielu": _xielu,
    "draw": _draw,
    "row_limits": _row_limits,
    "forbid": _forbid,
    "widen": _widen,
    "ban": _ban,
    "penalize": _penalize,
    "count": _count,
    "score": _score,
    "truncate": _truncate,
    "matmul": _dense_matmul,
    "gated_matmul": _gated_matmul,
    "block_dequantize": _dequantize,
    "block_matmul": _matmul,
    "route": _route,
    "dense_experts": _dense_experts,
    "block_experts": _block_experts,
    "select_inputs": _select_inputs,
    "join": _join,
    "causal_conv": _causal_conv,
    "scan": lambda: scans(((1, 16, 2, 5), (2, 48, 4, 8), (3, 128, 3, 6))),
    "gate": _gate,
}


_NO_OPS = {"choose", "split_product", "input_precision", "dense_precision", "rounds", "begin", "mask", "end"}
_NO_OPS |= {"record_calls", "gated_block_matmul", "block_feed_forward", "block_greedy", "sandwich_norm"}
_NO_OPS |= {"arrange", "explain", "latent_prompts", "add_low_rank", "group", "limits_dtype"}
_NO_OPS |= {"activated_block_matmul", "splits_floats", "placed_experts", "merge_parts"}
_NO_OPS |= {
    "packed_attention",
    "chain",
    "draw_from_parts",
    "multiply",
    "replace",
    "change_lookup",
    "own_rows",
}
_REF = ref_table()
_FAMILIES = [field.name for field in fields(KernelTable) if is_dataclass(getattr(_REF, field.name))]
_FAMILY_OF = {op.name: family for family in _FAMILIES for op in fields(getattr(_REF, family))}
OPS = [*(op for op in _FAMILY_OF if op not in _NO_OPS), "activate", "xielu"]
TRUNCATE_AND_DRAW = ["draw", "truncate"]
"""The two kernels that choose tokens on a GPU."""


def find(table: KernelTable, op: str) -> Callable[..., Any]:
    if op in TRUNCATE_AND_DRAW:
        return getattr(table.sampling.choose, op)
    return getattr(getattr(table, _FAMILY_OF[op]) if op in _FAMILY_OF else table, op)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Those of an argument, which may be a struct."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, Ragged)):
        parts = value if isinstance(value, tuple) else (value.cu_q_lens, value.kv_lens)
        for part in parts:
            yield from tensors_in(part)


def nothing_of(op: str, case: Case) -> tuple[Any, ...]:
    """The case's arguments with no tokens."""
    if op in ("paged_attention", "distance_attention"):
        q, cache, tables, batch, *rest = case.args
        none = Ragged(cu_q_lens=batch.cu_q_lens[:1], kv_lens=batch.kv_lens[:0])
        return q[:0], cache, tables[:0], none, *rest
    if op in ("causal_conv", "scan"):
        first, how, states, *rest = case.args
        none = Ragged(cu_q_lens=states.batch.cu_q_lens[:1], kv_lens=states.batch.kv_lens[:0])
        parts = first[:0] if op == "causal_conv" else Scanned(*(part[:0] for part in first[:4]))
        return parts, how, states._replace(slots=states.slots[:0], batch=none), *(None for _ in rest)
    if op == "join":
        return tuple(part[:0] for part in case.args)
    if op == "gate":
        return case.args[0][:0], case.args[1][:0], case.args[2]
    if op == "store_kv":
        new, cache, slots = case.args
        return HeadInputs(new.q[:0], new.k[:0], new.v[:0]), cache, slots[:0]
    if op == "block_dequantize":
        matrix, *rest = case.args
        return matrix._replace(blocks=matrix.blocks[:0]), *(arg[:0] for arg in rest[:1])
    if op.endswith("_experts"):
        x, routing, *matrices, form, shared = case.args
        none = None if shared is None else Shared(*(part if part is None else part[:0] for part in shared))
        return x[:0], Routing(*(part[:0] for part in routing)), *matrices, form, none
    if op == "truncate":
        return case.args[0][:0], Limits(*(numbers[:0] for numbers in case.args[1]))
    if op == "forbid":
        logits, rows, numbers, words = case.args
        return logits, rows[:0], numbers[:0], words
    if op == "penalize":
        logits, rows, lists, owners, strengths = case.args
        empty = lists._replace(rows=lists.rows[:0], lengths=lists.lengths[:0])
        return logits, rows[:0], empty, owners[:0], strengths
    if op == "ban":
        logits, words, ids, lengths = case.args
        return logits, Words(*(part[:0] for part in words)), ids, lengths
    if op == "count":
        lists, token_ids = case.args
        return lists._replace(rows=lists.rows[:0], lengths=lists.lengths[:0]), token_ids[:0]
    if op == "score":
        logits, (rows, token_ids, num_top, normalise, _) = case.args
        return logits, Scored(rows[:0], token_ids[:0], num_top, normalise)
    if op == "row_limits":
        return tuple(arg[:0] for arg in case.args)
    if op == "layer_norm":
        x, weight, bias, eps, *residual = case.args
        return x[:0], weight, bias, eps, *(stream[:0] for stream in residual)
    if op == "add_norm":
        x, weight, eps, residual = case.args
        return x[:0], weight, eps, residual[:0]
    if op == "cut_chunks":
        batch, tables, *how = case.args
        none = replace(batch, cu_q_lens=batch.cu_q_lens[:1], kv_lens=batch.kv_lens[:0], num_singles=0)
        return none, tables[:0], *how
    return (case.args[0][:0], *case.args[1:])


def _own(arg: Any) -> Any:
    """A copy of what may be written."""
    if isinstance(arg, HeadInputs):
        return arg._replace(q=copy.deepcopy(arg.q), k=copy.deepcopy(arg.k))
    return copy.deepcopy(arg)


def seen(op: str, args: Sequence[Any], result: Any) -> Any:
    """What anybody reads of a result."""
    return result[..., args[-1].keys_only :] if op == "paged_attention" else result


def run(table: KernelTable, op: str, case: Case) -> list[torch.Tensor]:
    args: list[Any] = [
        _own(arg) if index in case.changed + case.spoiled else arg for index, arg in enumerate(case.args)
    ]
    result = seen(op, args, find(table, op)(*args, **case.kwargs))
    outputs = list(result) if isinstance(result, tuple) else [] if result is None else [result]
    return [*outputs, *changed_in(case, args)]


def changed_in(case: Case, args: Sequence[Any]) -> list[torch.Tensor]:
    """What an op changes in place."""
    values = [args[index] for index in case.changed]
    parts = [x[2:4] if isinstance(x, TokenLists) else x[:1] if isinstance(x, States) else [x] for x in values]
    return [part for several in parts for part in several]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, name
    a, b = actual.double(), expected.double()
    finite = b.isfinite()
    assert torch.equal(a[~finite], b[~finite]), name
    limit = tolerance * max(1.0, float(b[finite].abs().max()))
    worst = float((a - b)[finite].abs().max())
    assert worst <= limit, f"{name}: off by {worst}, allowed {limit}"
