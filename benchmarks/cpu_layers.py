"""All matrices of a model, one after the other: `taskset -c 0-1 python benchmarks/cpu_layers.py [MODEL …]`.

Random weights in the block types and shapes of the two GGUF models, every layer with its own, so that they
come from memory as in a step. One JSON line per part (all layers, the head) and number of rows: median
milliseconds by input precision, beside torch's bfloat16 product with weights in its own order (oneDNN). Kinds
take turns.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from octavo.base.gguf import BLOCK_TYPES
from octavo.runtime.kernels.cpu.table import cpu_table
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.kernels.table import KernelTable

Matrix = tuple[str, int, int]
"""Block type, outputs, inputs."""
Work = Callable[[], object]

GEMMA: list[Matrix] = [("Q5_0", 1280, 640), ("Q8_0", 256, 640), ("Q4_K", 640, 1024), ("Q5_0", 4096, 640)]
SMOLLM2: list[Matrix] = [("Q4_1", 960, 576), ("Q4_1", 576, 576), ("Q4_1", 3072, 576), ("Q4_1", 576, 1536)]
MODELS: dict[str, tuple[list[Matrix], Matrix]] = {
    "smollm2": (SMOLLM2 * 30, ("Q8_0", 49152, 576)),
    "gemma": ([*GEMMA, ("Q6_K", 640, 2048), *GEMMA, ("Q4_K", 640, 2048)] * 9, ("Q8_0", 262144, 640)),
}
KINDS: tuple[InputPrecision, ...] = ("float32", "bfloat16", "int16", "int8")
MANY = 256
"""From so many rows on it is a prompt: no head, and of ours no float32."""


def packed(matrix: Matrix) -> Tensor:
    """Random bits under scales that are small and sane."""
    name, rows, columns = matrix
    kind = next(kind for kind in BLOCK_TYPES.values() if kind.name == name)
    blocks = torch.randint(0, 256, (rows * columns // kind.block, kind.num_bytes), dtype=torch.uint8)
    scale = torch.tensor([0.001], dtype=torch.float16).view(torch.uint8)
    for place in (208,) if name == "Q6_K" else (0,) if name in ("Q8_0", "Q5_0", "Q4_0") else (0, 2):
        blocks[:, place : place + 2] = scale
    return blocks.view(rows, -1)


def ours(table: KernelTable, matrices: list[tuple[Matrix, Tensor]], kind: InputPrecision, m: int) -> Work:
    xs = {matrix[2]: torch.randn(m, matrix[2]) for matrix, _ in matrices}

    def work() -> None:
        for (name, _, columns), blocks in matrices:
            table.linear.block_matmul(xs[columns], Packed(blocks, name, kind))

    return work


def torchs(matrices: list[Matrix], m: int) -> Work:
    """oneDNN, through the op that torch's own compiler emits."""
    ops = torch.ops.mkldnn
    plain = ((k, torch.randn(64, k).bfloat16().repeat(n // 64, 1)) for _, n, k in matrices)
    weights = [(k, ops._reorder_linear_weight(weight, m)) for k, weight in plain]
    xs = {k: torch.randn(m, k).bfloat16() for _, _, k in matrices}

    def work() -> None:
        for k, weight in weights:
            ops._linear_pointwise(xs[k], weight, None, "none", [], "")

    return work


def medians_ms(works: dict[str, Work], wall_s: float) -> dict[str, float]:
    """Of calls in turn, three each or what fits in `wall_s`."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    end, rounds = time.monotonic() + wall_s, 0
    while rounds < 3 or time.monotonic() < end:
        for name, work in works.items():
            start = time.perf_counter()
            work()
            times[name].append((time.perf_counter() - start) * 1e3)
        rounds += 1
    return {name: round(statistics.median(spans), 3) for name, spans in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,4,16,64,512,2048")
    parser.add_argument("--wall", type=float, default=1.0, help="seconds per line and part")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table, memory = cpu_table(args.threads), torch.ones(1 << 26, dtype=torch.int64)
    read = medians_ms({"read": memory.sum}, 1)["read"]
    print(
        json.dumps({"read GB/s": round(memory.nbytes / read / 1e6, 1), "auto": table.linear.input_precision}),
        flush=True,
    )
    with torch.inference_mode():
        for model in args.models:
            parts = dict(zip(("layers", "head"), (MODELS[model][0], [MODELS[model][1]]), strict=True))
            for part, matrices in parts.items():
                blocks = [(matrix, packed(matrix)) for matrix in matrices]
                size = {
                    "MB": sum(b.nbytes for _, b in blocks) / 1e6,
                    "MMAC": sum(n * k for _, n, k in matrices) / 1e6,
                }
                for m in map(int, args.rows.split(",")):
                    if m >= MANY and part == "head":
                        continue
                    kinds = KINDS if m < MANY else KINDS[1:]
                    works: dict[str, Work] = {kind: ours(table, blocks, kind, m) for kind in kinds}
                    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
                        works["torch bfloat16"] = torchs(matrices, m)
                    found = medians_ms(works, args.wall)
                    best = found["bfloat16"]
                    row = {"model": model, "part": part, "rows": m, **found}
                    row["GB/s"] = round(size["MB"] / best, 1)
                    row["TFLOP/s"] = round(2 * m * size["MMAC"] / best / 1e6, 3)
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
