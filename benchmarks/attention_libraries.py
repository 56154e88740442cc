"""FlashAttention and FlashInfer beside octavo's attention, in bfloat16 over a cache of 64-slot blocks.

python benchmarks/record.py gpu-attention-libraries python -m benchmarks.attention_libraries

Four models' heads, prompts and decoding; random numbers. Prints one JSON line per model and step:
milliseconds (medians of event times), a step's first layer by the clock, in which FlashInfer plans, and how
far results are apart.
"""

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from octavo.messages.kv import HeadsKV
from octavo.runtime.attention.flashinfer import FlashInferBackend
from octavo.runtime.attention.interface import AttentionBackend
from octavo.runtime.attention.library import LibraryBackend
from octavo.runtime.attention.registry import BACKENDS, choose_backend
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.kernels.attention import Scores
from octavo.runtime.kernels.cache_layout import CacheLayout
from octavo.runtime.platforms.platform import get_platform

HEADS = {
    "Qwen3-0.6B": (16, 8, 128),
    "Llama-3.1-8B": (32, 8, 128),
    "Gemma 3 4B": (8, 4, 256),
    "gpt-oss-20b": (64, 8, 64),
}
STEPS = {
    "prompt 1 x 2048": (1, 2048, 2048),
    "prompt 4 x 512 behind 1536": (4, 512, 2048),
    "prompt 1 x 8192": (1, 8192, 8192),
    "decode 8 at 1024": (8, 1, 1024),
    "decode 64 at 2048": (64, 1, 2048),
    "decode 256 at 1024": (256, 1, 1024),
}
BLOCK, TIMES = 64, 15
LAYERS = 32
"""Among which a plan is shared."""
PACKAGES = {"flash_attn": ("flash_attn_interface", "flash_attn"), "flashinfer": ("flashinfer",)}


def milliseconds(work: Callable[[], object]) -> float:
    """Median on the device, in a stream that is kept busy."""
    times: list[float] = []
    for _ in range(TIMES + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(3_000_000)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(statistics.median(times[3:]), 4)


def rows(libraries: list[str]) -> Iterator[dict[str, Any]]:
    """One per model and step, and what a start would choose."""
    platform = get_platform("cuda", 1)
    for model, (heads, kv_heads, size) in HEADS.items():
        spec = HeadsKV(kv_heads, size, "bfloat16", 4 * kv_heads * size)
        makers = {name: BACKENDS.load(name) for name in ("paged", "cudnn", *libraries)}
        able = {name: kind for name, kind in makers.items() if not kind.supports(spec, platform)}
        made = {name: kind(platform, "float32") for name, kind in able.items()}
        for step, shape in STEPS.items():
            row = {"model": model, "heads": f"{heads}/{kv_heads} x {size}", "step": step}
            yield row | figures(made, spec, heads, *shape)
        FlashInferBackend.why_not_tried = staticmethod(lambda: "")  # by now its kernels are compiled
        chosen = choose_backend([spec] * LAYERS, platform, num_heads=heads)
        yield {
            "model": model,
            "chosen_at_start": type(chosen).__name__,
            "for": sorted(getattr(chosen, "kinds", ())),
        }


def figures(
    backends: dict[str, AttentionBackend], spec: HeadsKV, heads: int, requests: int, new: int, tokens: int
) -> dict[str, float]:
    """Time all over the same batch; "paged" comes first, and the distance to it is told."""
    cache = CacheLayout(spec, BLOCK).zeros(requests * tokens // BLOCK, torch.device("cuda"))
    cache.copy_(torch.randn_like(cache))
    tables = torch.randperm(len(cache), dtype=torch.int32, device="cuda").view(requests, -1)
    q = torch.randn(requests * new, heads, spec.head_dim, dtype=cache.dtype, device="cuda")
    bounds = torch.arange(0, requests * new + 1, new, dtype=torch.int32, device="cuda")
    batch = ForwardBatch(
        input_ids=bounds,
        positions=bounds,
        cu_q_lens=bounds,
        kv_lens=torch.full((requests,), tokens, dtype=torch.int32, device="cuda"),
        num_singles=requests if new == 1 else 0,
        longest_q=new,
        kv_caches=[cache],
        groups=[GroupTables(tables, tables)],
        group_of_layer=[0],
    )
    scores, found = Scores(spec.head_dim**-0.5), dict[str, float]()
    expected = backends["paged"].attend(q, cache, batch.groups[0], batch, scores).float()
    for name, backend in backends.items():
        if name == "cudnn" and new == 1:
            continue

        def attend(backend: Any = backend) -> torch.Tensor:
            if isinstance(backend, LibraryBackend):
                return backend.attend_by_library(q, cache, tables, batch, scores)
            made: torch.Tensor = backend.attend(q, cache, batch.groups[0], batch, scores)
            return made

        torch.cuda.synchronize()
        began = time.perf_counter()
        backend.plan(batch)
        made = attend().float()
        torch.cuda.synchronize()
        found[f"{name}_first_ms"] = round((time.perf_counter() - began) * 1e3, 3)
        found[f"{name}_ms"] = milliseconds(attend)
        found[f"{name}_off"] = round(float((made - expected).norm() / expected.norm()), 5)
    return found


if __name__ == "__main__":
    installed = [name for name, modules in PACKAGES.items() if any(map(importlib.util.find_spec, modules))]
    for line in rows(installed):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
