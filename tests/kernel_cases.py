"""Inputs for every op of the kernel table, by op name; fast kernels are compared with their twins on them."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

from octavo.base.gguf import BLOCK_TYPES
from octavo.runtime.kernels.table import KernelTable

BLOCKS = {kind.name: kind for kind in BLOCK_TYPES.values()}
TYPE_NAMES = sorted(BLOCKS)
CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Case:
    """One call of an op. `changed` names the positional arguments that the op changes in place."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    changed: tuple[int, ...] = ()
    tolerance: float = 2e-6
    """Largest error, relative to the largest value."""


def make_blocks(type_name: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """[rows, row_bytes] of sane weights: quantized by the `gguf` package, or random bits and small scales."""
    rng = np.random.default_rng(seed)
    kind = BLOCKS[type_name]
    weights = (rng.standard_normal((rows, columns)) * 0.05).astype(np.float32)
    if type_name in ("Q4_K", "Q5_K", "Q6_K"):  # the package has no quantizer for these
        raw = rng.integers(0, 256, (rows, columns // kind.block, kind.num_bytes), dtype=np.uint8)
        scale = np.frombuffer(np.float16(0.0007).tobytes(), np.uint8)
        places = (208,) if type_name == "Q6_K" else (0, 2)
        for place in places:
            raw[..., place : place + 2] = scale
        return torch.from_numpy(raw.reshape(rows, -1))
    packed = quants.quantize(weights, GGMLQuantizationType[type_name])
    return torch.from_numpy(packed.view(np.uint8).reshape(rows, -1).copy())


@dataclass
class Paged:
    """A filled cache and a ragged batch over it."""

    cache: torch.Tensor
    block_tables: torch.Tensor
    cu_q_lens: torch.Tensor
    kv_lens: torch.Tensor
    q: torch.Tensor

    def args(self) -> tuple[torch.Tensor, ...]:
        return (self.q, self.cache, self.block_tables, self.cu_q_lens, self.kv_lens)


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
        cache.to(dtype),
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
                    paged.args(),
                    {"scale": head_dim**-0.5, "sliding_window": window, "soft_cap": cap},
                )


def _write_kv() -> Iterator[Case]:
    for dtype in CACHE_DTYPES:
        for kv_heads, head_dim, block_size in ((3, 64, 16), (1, 36, 5), (2, 256, 64)):
            fused = torch.randn(9, 4 * kv_heads, head_dim)
            fused[0, 0, :4] = torch.tensor([float("inf"), -0.0, 1e-40, 7e4])
            cache = torch.randn(4, 2, block_size, kv_heads, head_dim).to(dtype)
            slots = torch.tensor(
                [0, -1, block_size - 1, block_size, -1, 3 * block_size + 2, 2 * block_size, 1, -1]
            )
            k, v = fused[:, :kv_heads], fused[:, kv_heads : 2 * kv_heads]
            yield Case(f"{kv_heads}x{head_dim} {dtype}", (k, v, cache, slots), changed=(2,), tolerance=0)


def _rms_norm() -> Iterator[Case]:
    for tokens, size in ((1, 576), (3, 7), (70, 640), (1, 1)):
        x, residual, weight = torch.randn(tokens, 2 * size), torch.randn(tokens, size), torch.randn(size)
        yield Case(f"{tokens}x{size}", (x[:, :size], weight, 1e-6))
        yield Case(f"{tokens}x{size} residual", (x[:, size:], weight, 1e-5), {"residual": residual})
    x = torch.randn(5, 12, 64)
    yield Case("heads", (x[:, 2:7], torch.randn(64), 1e-6))


def _rope() -> Iterator[Case]:
    for heads, head_dim, half in ((9, 64, 32), (1, 80, 20), (2, 6, 3), (4, 256, 128)):
        for interleaved in (False, True):
            angles = torch.randn(11, half) * 100
            x = torch.randn(11, heads + 1, head_dim)
            args = (x[:, 1:], angles.cos(), angles.sin(), interleaved)
            yield Case(f"{heads}x{head_dim} rotate {2 * half} {interleaved}", args, changed=(0,))


def _activation(gated: bool) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        for tokens, size in ((1, 1536), (3, 7), (40, 2048)):
            x = torch.randn(tokens, size * (1 + gated)) * 5
            x[0, :3] = torch.tensor([-100.0, 100.0, 0.0])
            yield Case(f"{tokens}x{size}", (x,))

    return cases


def _dequantize() -> Iterator[Case]:
    for name in TYPE_NAMES:
        yield Case(name, (make_blocks(name, 5, 512), name), tolerance=1e-7)


def _matmul() -> Iterator[Case]:
    for name in TYPE_NAMES:
        for m, n, k in ((1, 30, 512), (2, 7, 256), (6, 97, 768), (33, 64, 256)):
            x = torch.randn(m, k + 5)[:, :k]
            yield Case(f"{name} {m}x{n}x{k}", (x, make_blocks(name, n, k), name), {"bias": torch.randn(n)})
    for name in ("F32", "F16", "BF16"):
        for m in (1, 5):
            yield Case(f"{name} odd {m}", (torch.randn(m, 75), make_blocks(name, 11, 75), name))


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "write_kv": _write_kv,
    "paged_attention": _attention,
    "rms_norm": _rms_norm,
    "apply_rope": _rope,
    "silu_and_mul": _activation(True),
    "gelu_and_mul": _activation(True),
    "gelu_tanh_and_mul": _activation(True),
    "gelu": _activation(False),
    "gelu_tanh": _activation(False),
    "block_dequantize": _dequantize,
    "block_matmul": _matmul,
}


def run(table: KernelTable, op: str, case: Case) -> list[torch.Tensor]:
    args: list[Any] = [
        copy.deepcopy(arg) if index in case.changed else arg for index, arg in enumerate(case.args)
    ]
    result = getattr(table, op)(*args, **case.kwargs)
    outputs = result if isinstance(result, tuple) else [] if result is None else [result]
    return [*outputs, *(args[index] for index in case.changed)]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, name
    a, b = actual.double(), expected.double()
    finite = b.isfinite()
    assert torch.equal(a[~finite], b[~finite]), name
    limit = tolerance * max(1.0, float(b[finite].abs().max()))
    worst = float((a - b)[finite].abs().max())
    assert worst <= limit, f"{name}: off by {worst}, allowed {limit}"
