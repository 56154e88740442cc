"""Packed matrices of an 8B model's layer on a GPU: checked against dequantized products, timed beside bf16.

python -m benchmarks.gpu_quantized [--types U4_64,Q8_0] [--rows 1,8] [--sweep]

F8 and S8 with a scale per channel or block also round their inputs; they are checked against the product of
what was rounded. U4_64:group has groups of 128.

Per type and number of rows: µs of the layer's four products, GB/s of packed bytes, and how many times as fast
as torch's products of bf16 matrices of the same shapes. Matrices rotate, so that none stays in L2. A sweep
tries tiles instead, on two of the matrices.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from octavo.runtime.kernels.block_types import TYPES_BY_NAME
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.blocks import block_dequantize
from octavo.runtime.kernels.ref.blocks import block_matmul as rounded_matmul
from octavo.runtime.kernels.triton import arranged
from octavo.runtime.kernels.triton.precompile import compile_ahead
from octavo.runtime.kernels.triton.table import cuda_table

LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
ROWS = "1,8,32,64,128,256,2048,8192"
TYPES = "U4_32,U4_64,U4_64:group,Q4_0,Q4_K,Q8_0,F8_64,F8_64:channel,F8_64:block,S8_64:channel"
SHARING = {"channel": (1, 1 << 20), "group": (1, 128), "block": (128, 128)}
"""Outputs and inputs that share a scale."""
_L2 = 200 << 20  # bytes that do not stay in it
_LINEAR = cuda_table().linear


def random_blocks(name: str, rows: int, columns: int) -> Packed:
    """Any bits, but scales like those of real weights."""
    name, _, shared = name.partition(":")
    kind = TYPES_BY_NAME[name]
    shape = rows * columns // kind.block, kind.num_bytes
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    scales = torch.rand(len(raw), 1, device="cuda") * 0.01 + 0.005
    if name.startswith(("S", "F8")):
        raw[:, :4] = (scales / 16).view(torch.uint8)
        body = raw[:, 4:]
        body[body & 127 == 127] ^= 1  # E4M3 has a NaN
    elif name == "MXFP4":
        raw[:, 0] = 119
    elif name == "NV4_64":
        raw[:, :4], raw[:, 4:8] = (scales / 16).view(torch.uint8), raw[:, 4:8] % 127
    else:
        raw[:, :2] = (scales / (16 if "8" in name or "K" in name else 1)).half().view(torch.uint8)
    if name.startswith("U4"):
        raw[:, 2:4] = torch.full_like(scales, 8.0).half().view(torch.uint8)
    elif name in ("Q4_1", "Q4_K"):
        raw[:, 2:4] = (scales * (-8.0 if name == "Q4_1" else 0.03)).half().view(torch.uint8)
    if shared:
        outputs, inputs = SHARING[shared]
        parts = raw.view(rows, -1, kind.num_bytes)
        n = torch.arange(rows, device="cuda") // outputs * outputs
        k = torch.arange(parts.shape[1], device="cuda") * kind.block // inputs * inputs // kind.block
        parts[:, :, :4] = parts[:, :, :4][n][:, k].clone()
    rounds = {"F8": "float8", "S8": "int8"}.get(name[:2], "float32") if shared else "float32"
    return Packed(raw.view(rows, -1), name, rounds)


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """Median time of a call, in replays of a graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(calls) * 1e3)
    return sorted(times[2:])[5]


def error(x: Tensor, matrix: Packed, exact: Tensor) -> float:
    """Of the product, relative to that of the exact weights in float32."""
    is_rounded = matrix.scales is not None
    expected = rounded_matmul(x.float(), matrix) if is_rounded else x.float() @ exact.t()
    return float((_LINEAR.block_matmul(x, matrix).float() - expected).norm() / expected.norm())


def copies(matrix: Packed) -> list[Packed]:
    number = max(1, _L2 // matrix.blocks.nbytes)
    return [matrix._replace(blocks=matrix.blocks.clone()) for _ in range(number)]


def sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def inputs(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def measure(name: str, plain: dict[tuple[int, int, int], float], all_rows: list[int]) -> None:
    matrices, worst = {}, 0.0
    for n, k in LAYER:
        packed = random_blocks(name, n, k)
        made, exact = _LINEAR.arrange(packed, torch.bfloat16), block_dequantize(packed)
        for rows in all_rows:
            worst = max(worst, error(inputs(rows, k), made, exact))
        matrices[n, k] = copies(made)
    assert worst < 2e-2, (name, worst)
    for rows in all_rows:
        total, base, size = 0.0, 0.0, 0
        for (n, k), several in matrices.items():
            x = inputs(rows, k)
            calls = [lambda m=matrix, x=x: _LINEAR.block_matmul(x, m) for matrix in several]
            total += microseconds(calls)
            base, size = base + plain[rows, n, k], size + several[0].blocks.nbytes
        print(
            f"{name:13} {rows:4} rows: {total:8.1f} us {size / total / 1e3:6.0f} GB/s",
            f"{base / total:5.2f} times bf16 ({base:.1f} us), off by {worst:.1e}",
            flush=True,
        )


def plain_times(all_rows: list[int]) -> dict[tuple[int, int, int], float]:
    times = {}
    for (n, k), rows in itertools.product(LAYER, all_rows):
        x, number = inputs(rows, k), max(1, _L2 // (n * k * 2))
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(number)]
        calls = [lambda w=w, x=x: functional.linear(x, w) for w in weights]
        times[rows, n, k] = microseconds(calls)
    return times


def sweep(names: list[str]) -> None:
    """Print the best tiles of each shape; compiled side by side first."""
    tiles, kept = arranged.tiles, {}
    options = list(itertools.product(((16, 1), (32, 2), (64, 4)), (2, 3), (132, 264, 528)))
    work = []
    for name, (n, k), rows in itertools.product(names, (LAYER[1], LAYER[2]), (1, 16, 32, 64)):
        matrix = _LINEAR.arrange(random_blocks(name, n, k), torch.bfloat16)
        several = kept.setdefault((name, n), copies(matrix))
        seen = set()
        for (tile_n, warps), stages, programs in options:
            parts = k // (32 * arranged.codes_of_word(matrix.type_name.partition("_")[0]))
            chosen = {"TILE_N": tile_n, "SPLIT": max(1, min(programs // -(-n // tile_n), parts // 2))}
            chosen |= {"num_warps": warps, "num_stages": stages}
            if tuple(chosen.values()) not in seen:
                seen.add(tuple(chosen.values()))
                base = tiles(rows, n, k, matrix.type_name.partition("_")[0])
                work.append((name, n, k, rows, several, base | chosen))

    def run(item: Any, number: int = 1) -> list[Callable[[], Any]]:
        _, _, k, rows, several, tile = item
        x = inputs(rows, k)
        arranged.tiles = lambda *shape: tile
        calls = [lambda m=m: _LINEAR.block_matmul(x, m) for m in several[:number]]
        for call in calls[:1]:
            call()
        return calls

    def run_all() -> None:
        for item in work:
            run(item)

    compile_ahead(run_all, torch.device("cuda", 0))
    found: dict[Any, list[tuple[float, Any]]] = {}
    for item in work:
        try:
            calls = run(item, len(item[4]))
            took = microseconds(calls)
        except Exception as failed:
            print(item[:4], item[5], str(failed).splitlines()[0][:60])
            continue
        found.setdefault(item[:4], []).append((took, item[5]))
    for shape, results in found.items():
        results.sort(key=lambda result: result[0])
        size = kept[shape[0], shape[1]][0].blocks.nbytes
        for took, tile in results[:4] + results[-1:]:
            print(shape, f"{took:.2f} us {size / took / 1e3:.0f} GB/s", list(tile.items())[1:], flush=True)
    arranged.tiles = tiles


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--rows", type=sizes, default=ROWS)
    parser.add_argument("--sweep", action="store_true")
    asked = parser.parse_args()
    if asked.sweep:
        return sweep(asked.types.split(","))
    plain = plain_times(asked.rows)
    for name in asked.types.split(","):
        measure(name, plain, asked.rows)
    return None


if __name__ == "__main__":
    main()
