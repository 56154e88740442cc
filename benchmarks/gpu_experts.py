"""Experts on a GPU: the kernels checked against the reference, then timed beside their floor.

python benchmarks/gpu_experts.py [--sweep]

The floor is the matrices of the chosen experts read at 4.3 TB/s, or 2 products per number at 800 TFLOP/s.
A sweep tries tiles.
"""

import argparse
import itertools

import torch

from octavo.runtime.kernels.experts import ExpertForm, Router, Routing
from octavo.runtime.kernels.ref.experts import dense_experts as reference
from octavo.runtime.kernels.triton import experts
from octavo.runtime.kernels.triton import routing as routes

MODELS = {"qwen3-30b-a3b": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336)}
ROWS = (1, 32, 256, 2048)


def make(name: str, rows: int) -> tuple[torch.Tensor, Routing, torch.Tensor, torch.Tensor]:
    """Inputs, their experts, and the matrices."""
    count, top_k, size, inner = MODELS[name]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    routing = routes.route(draw(rows, count), None, Router(top_k, normalises=True))
    return draw(rows, size), routing, draw(count, 2 * inner, size) * 0.02, draw(count, size, inner) * 0.02


def microseconds(given: tuple[torch.Tensor, Routing, torch.Tensor, torch.Tensor]) -> float:
    """Median of graph replays; the matrices of a layer are larger than L2."""
    experts.dense_experts(*given, ExpertForm(), None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    spoil = torch.empty(64 << 20, device="cuda", dtype=torch.uint8)
    with torch.cuda.graph(graph):
        experts.dense_experts(*given, ExpertForm(), None)
    times = []
    for _ in range(14):
        spoil.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times[4:])[5]


def floor(name: str, routing: Routing) -> float:
    _, _, size, inner = MODELS[name]
    chosen = len(routing.ids.unique())
    products = 6 * routing.ids.numel() * size * inner
    return max(chosen * 3 * size * inner * 2 / 4.3e6, products / 8e8)


def check(name: str) -> float:
    given = make(name, 77)
    made = experts.dense_experts(*given, ExpertForm(), None).float()
    x, routing, up, down = given
    exact = reference(x.float(), routing, up.float(), down.float(), ExpertForm(), None)
    return float((made - exact).norm() / exact.norm())


def sweep() -> None:
    sizes = routes.tile_sizes
    for name, rows in itertools.product(MODELS, ROWS[1:]):
        given, results = make(name, rows), []
        for tile_m, tile_n, tile_k, (warps, stages) in itertools.product(
            (16, 32, 64, 128), (64, 128, 256), (64, 128), ((4, 3), (4, 4), (8, 3))
        ):
            per_expert = given[1].ids.numel() / MODELS[name][0]
            if not per_expert / 4 <= tile_m <= max(16, 4 * per_expert) or tile_m * tile_n > 2**14:
                continue
            tile = {"TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": tile_k}
            tile |= {"num_warps": warps, "num_stages": stages}
            routes.tile_sizes = lambda *_, tile=tile, **__: tile
            try:
                results.append((microseconds(given), tile))
            except Exception as failed:
                print(tile, str(failed).splitlines()[0][:70])
        results.sort(key=lambda result: result[0])
        print(name, rows, "floor", round(floor(name, given[1]), 1), *results[:3], sep="\n  ", flush=True)
    routes.tile_sizes = sizes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    asked = parser.parse_args()
    for name in MODELS:
        off = check(name)
        assert off < 1e-2, (name, off)
        for rows in ROWS:
            given = make(name, rows)
            took, least = microseconds(given), floor(name, given[1])
            print(f"{name} {rows} rows: {took:.1f} us, {took / least:.2f} times the floor, off by {off:.1e}")
    if asked.sweep:
        sweep()


if __name__ == "__main__":
    main()
