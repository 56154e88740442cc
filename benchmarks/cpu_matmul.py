"""Products with packed weights on one thread: `python benchmarks/cpu_matmul.py` prints a JSON line for each.

Time is the calling thread's CPU time, best of many calls, so that other work on the machine disturbs little.
The first line is what reading memory costs: no product at one row can be faster.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from octavo.runtime.kernels.cpu.table import cpu_table
from octavo.runtime.kernels.linear import Packed
from tests.kernel_cases import make_blocks

NUM_BYTES = 24_000_000


def best_s(call: Callable[[], object], wall_s: float = 0.4) -> float:
    """Least CPU time of a call."""
    call()
    best, end = float("inf"), time.monotonic() + wall_s
    while time.monotonic() < end:
        start = time.thread_time_ns()
        call()
        best = min(best, (time.thread_time_ns() - start) * 1e-9)
    return best


def main() -> None:
    torch.set_num_threads(1)
    table, memory = cpu_table(1), torch.ones(1 << 23, dtype=torch.int64)
    print(json.dumps({"read GB/s": round(memory.nbytes / best_s(memory.sum) / 1e9, 1)}), flush=True)
    for name in ("Q8_0", "Q5_0", "Q6_K", "Q4_K", "Q4_1"):
        k = 2048 if name == "Q5_0" else 768
        sample = make_blocks(name, 64, k)
        blocks = sample.repeat(NUM_BYTES // sample.nbytes, 1)
        for m in (1, 4, 16, 64):
            row: dict[str, object] = {"type": name, "rows": m}
            x = torch.randn(m, k)
            for kind in ("float32", "int16", "int8"):
                seconds = best_s(partial(table.linear.block_matmul, x, Packed(blocks, name, kind)))
                row[f"{kind} GB/s"] = round(blocks.nbytes / seconds / 1e9, 2)
                row[f"{kind} GMAC/s"] = round(m * k * len(blocks) / seconds / 1e9, 1)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
