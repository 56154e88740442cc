"""Attention over the paged cache on CPU: `python benchmarks/cpu_attention.py [--threads N] [--old LIBRARY]`.

First compares with the reference, and bits over threads and chunks; then a JSON line per workload: µs of
one layer, median of calls in turn, each over the cache of another layer so that none is warm. Beside it:
torch (gather, then scaled_dot_product_attention), an older build of the kernels, and what reading the same
bytes costs (of decoding) or the arithmetic at the rate of a large float32 product (of prompts).
"""

import argparse
import ctypes
import json
import mmap
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from octavo.runtime.kernels.attention import PagedAttention, Ragged, Scores
from octavo.runtime.kernels.cache_layout import SCALE_BYTES, rounded, rounded_parts
from octavo.runtime.kernels.cpu.library import Library
from octavo.runtime.kernels.cpu.table import cpu_table, table_of
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.kernels.ref.cache import paged_attention as reference
from octavo.runtime.kernels.table import KernelTable

BLOCK = 16
MODELS = {"SmolLM2-135M": (9, 3, 64), "Gemma 3 270M": (4, 1, 256), "Qwen3-0.6B": (16, 8, 128)}
WORKLOADS = {  # (new, all) tokens of each request
    "prefill 2048": [(2048, 2048)],
    "prefill 512 behind 1536": [(512, 2048)],
    "decode 32 x 300": [(1, 300)] * 32,
    "decode 1 x 8192": [(1, 8192)],
    "decode 1 x 512": [(1, 512)],
    "decode 32 x 550, 512 shared": [(1, 550)] * 32,
}
COMMON = {"decode 32 x 550, 512 shared": 512}  # tokens that all requests begin with, in the same blocks
CHECKS = [(1, 1), (1, 33), (5, 5), (1, 300), (130, 700), (16, 97), (1, 1500), (3, 1030), (9, 513)]


class Batch(NamedTuple):
    q: Tensor
    tables: Tensor
    starts: Tensor
    lens: Tensor

    @property
    def num_blocks(self) -> int:
        return int(self.tables.max()) + 1

    def over(self, cache: Tensor) -> tuple[Tensor, Tensor, Tensor, Ragged]:
        """What attention takes before its scores."""
        return self.q, cache, self.tables, Ragged(cu_q_lens=self.starts, kv_lens=self.lens)

    def in_chunks(self, size: int) -> "Batch":
        """The same queries, every request cut into several."""
        tables, ends, lens = [], [0], []
        for r, length in enumerate(self.lens.tolist()):
            begin, end = self.starts[r : r + 2].tolist()
            for first in range(begin, end, size):
                ends.append(min(end, first + size))
                lens.append(length - end + ends[-1])
                tables.append(self.tables[r])
        return Batch(self.q, torch.stack(tables), torch.tensor(ends).int(), torch.tensor(lens).int())


def make_batch(requests: list[tuple[int, int]], heads: int, size: int, common: int = 0) -> Batch:
    """Queries of one layer; blocks lie in random order. common: tokens in blocks that all requests share"""
    shared = common // BLOCK
    counts = [-(-length // BLOCK) - shared for _, length in requests]
    order = (1 + torch.randperm(shared + sum(counts))).int()
    tables = torch.zeros(len(requests), shared + max(counts), dtype=torch.int32)
    tables[:, :shared] = order[:shared]
    for row, blocks in zip(tables, order[shared:].split(counts), strict=True):
        row[shared : shared + len(blocks)] = blocks
    news, lens = (torch.tensor(column) for column in zip(*requests, strict=True))
    starts = functional.pad(news.cumsum(0), (1, 0)).int()
    return Batch(torch.randn(int(news.sum()), heads, size), tables, starts, lens.int())


def make_cache(blocks: int, heads: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(blocks, 2, BLOCK, heads, size).to(dtype)


def in_int8(cache: Tensor) -> Tensor:
    """The same keys and values, rounded."""
    made = torch.zeros(*cache.shape[:-1], cache.shape[-1] + SCALE_BYTES, dtype=torch.int8)
    for part, new in zip(rounded_parts(made), rounded(cache), strict=True):
        part.copy_(new)
    return made


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy in memory of 2 MiB pages, if the system gives any."""
    pages = mmap.mmap(-1, tensor.nbytes)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


def check(one: PagedAttention, many: PagedAttention) -> None:
    """End with an error where results are wrong. many: with several threads"""
    kinds: tuple[InputPrecision, ...] = ("float32", "bfloat16")
    for kind in kinds:
        worst = 0.0
        for heads, kv_heads, size in [*MODELS.values(), (8, 1, 96), (32, 2, 32)]:
            for window, cap in ((0, 0.0), (40, 30.0), (600, 0.0)):
                batch = make_batch(CHECKS, heads, size)
                cache = make_cache(batch.num_blocks, kv_heads, size)
                scores = Scores(size**-0.5, window, cap)
                made = one(*batch.over(cache), scores, kind)
                error = float((made - reference(*batch.over(cache), scores)).abs().max())
                worst = max(worst, error)
                assert error < (2e-5 if kind == "float32" else 0.04), (kind, heads, size, window, error)
                for other in (batch, batch.in_chunks(1), batch.in_chunks(50)):
                    again = many(*other.over(cache), scores, kind)
                    assert torch.equal(made, again), (kind, heads, size, window)
        print(json.dumps({"check": kind, "largest error": worst, "same bits": True}), flush=True)


def by_octavo(table: KernelTable, batch: Batch, kind: InputPrecision, cache: Tensor) -> Tensor:
    scores = Scores(batch.q.shape[2] ** -0.5, input_precision=kind)
    return table.attention.paged_attention(*batch.over(cache), scores)


def by_torch(batch: Batch, cache: Tensor) -> Tensor:
    """Per request: gather, then attention in the type of the cache; batched where all are alike."""
    lens, news = batch.lens.tolist(), batch.starts.diff().tolist()
    if set(news) == {1} and len(set(lens)) == 1:
        keys, values = _gathered(cache, batch.tables, lens[0])
        q = batch.q.to(cache.dtype)[:, :, None]
        return functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True).float()
    parts = []
    for table, length, q in zip(batch.tables, lens, batch.q.split(news), strict=True):
        keys, values = _gathered(cache, table[None], length)
        mask = torch.ones(len(q), length, dtype=torch.bool).tril(length - len(q))
        plain = len(q) == length
        parts.append(
            functional.scaled_dot_product_attention(
                q.to(cache.dtype).transpose(0, 1)[None],
                keys,
                values,
                attn_mask=None if plain else mask,
                is_causal=plain,
                enable_gqa=True,
            )
        )
    return torch.cat(parts, 2).float()


def _gathered(cache: Tensor, tables: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Two of [requests, heads, length, size]."""
    blocks = cache[tables[:, : -(-length // BLOCK)].long()]
    keys, values = (blocks[:, :, i].flatten(1, 2)[:, :length].transpose(1, 2) for i in (0, 1))
    return keys, values


def old_kernel(path: str, threads: int) -> Callable[[Batch, Tensor], object]:
    """`octavo_attention` of a library that was built from older sources."""
    function = ctypes.CDLL(path).octavo_attention
    kinds = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
    function.argtypes = [kinds[letter] for letter in "pllpilllplppiflfpi"]

    def call(batch: Batch, cache: Tensor) -> None:
        q, tables, starts, lens = batch
        out = torch.empty_like(q)
        sizes = (q.stride(0), q.shape[1], cache.data_ptr(), 2, *cache.shape[2:], tables.data_ptr())
        rest = (tables.stride(0), starts.data_ptr(), lens.data_ptr(), len(lens), q.shape[2] ** -0.5, 0, 0.0)
        function(q.data_ptr(), *sizes, *rest, out.data_ptr(), threads)

    return call


def medians_us(
    calls: dict[str, tuple[Callable[[Tensor], object], list[Tensor]]], wall_s: float
) -> dict[str, float]:
    """Median time of each call, all in turn, over its tensors in turn; CPU time where there is one thread."""
    clock = time.perf_counter_ns if torch.get_num_threads() > 1 else time.thread_time_ns
    times: dict[str, list[int]] = {name: [] for name in calls}
    end, turn = time.monotonic() + wall_s, 0
    while turn < 3 * len(calls) or time.monotonic() < end:
        for name, (call, caches) in calls.items():
            cache = caches[turn % len(caches)]
            start = clock()
            call(cache)
            times[name].append(clock() - start)
            turn += 1
    return {name: round(median(values) / 1000, 1) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--old", default="")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--library", default="", help="kernels that were built elsewhere")
    parser.add_argument("--huge-pages", action="store_true")
    parser.add_argument("--only", default="", help="a word of the workloads' names")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    path = args.library
    one, table = (table_of(Library(path), n) if path else cpu_table(n) for n in (1, args.threads))
    if not args.no_check:
        check(one.attention.paged_attention, table.attention.paged_attention)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    (rate,) = medians_us({"": (b.matmul, [a])}, 0.5).values()
    print(json.dumps({"float32 product, GFLOP/s": round(2 * 1024**3 / rate / 1000, 1)}), flush=True)
    for model, (heads, kv_heads, size) in MODELS.items():
        for name, requests in WORKLOADS.items():
            if args.only not in name:
                continue
            batch = make_batch(requests, heads, size, COMMON.get(name, 0))
            cache = make_cache(batch.num_blocks, kv_heads, size)
            layers = 3 if "prefill" in name else max(3, (192 << 20) // cache.nbytes)
            copied = in_huge_pages if args.huge_pages else torch.clone
            caches, small = ([copied(each) for _ in range(layers)] for each in (cache, in_int8(cache)))
            kinds: tuple[InputPrecision, ...] = ("float32", "bfloat16")
            calls: dict[str, tuple[Callable[[Tensor], object], list[Tensor]]] = {}
            for kind in kinds:
                calls[kind] = partial(by_octavo, table, batch, kind), caches
                calls[f"{kind}, int8 cache"] = partial(by_octavo, table, batch, kind), small
            calls["torch, gather + SDPA"] = partial(by_torch, batch), caches
            if args.old:
                calls["older"] = partial(old_kernel(args.old, args.threads), batch), caches
            if "decode" in name:
                calls["reading"] = lambda cache: cache.view(torch.int64).sum(), caches
            row: dict[str, object] = {"model": model, "workload": name, "threads": args.threads}
            row["huge pages"] = args.huge_pages
            row |= {f"{kind}, us": us for kind, us in medians_us(calls, args.seconds).items()}
            pairs = sum(new * (length - (new - 1) / 2) for new, length in requests)
            print(json.dumps(row | {"GFLOP": round(4 * size * heads * pairs / 1e9, 3)}), flush=True)


if __name__ == "__main__":
    main()
