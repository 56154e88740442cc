"""Recurrent layers on a GPU: the kernels checked against the reference, then timed beside their floor.

python -m benchmarks.gpu_recurrent [--sweep]

The floor of decoding is each state read and written once at 3.0 TB/s (an H100; 4.3 on an H200), that of
prompts their tokens. A sweep tries chunks and rows of a state. One JSON line per shape.
"""

import argparse
import json
from itertools import product

import torch

from benchmarks.gpu_quantized import microseconds
from octavo.runtime.kernels.attention import Ragged
from octavo.runtime.kernels.recurrent import Conv, Decay, Scanned, States
from octavo.runtime.kernels.ref import recurrent as reference
from octavo.runtime.kernels.triton import chunked_scan, recurrent

MODELS = {
    "qwen3-next": (32, 16, 128, 128, True),
    "granite-4.0-h-tiny": (48, 1, 128, 64, False),
    "falcon-h1-7b": (24, 2, 256, 128, False),
}
"""Heads, groups, sizes of keys and of values, by the delta rule."""
BLOCK, TERABYTES = 512, 3.0


def make(name: str, lens: list[tuple[int, int]]) -> tuple[Scanned, Decay, States]:
    """Requests of (new tokens, of so many)."""
    heads, groups, size, rows, is_delta = MODELS[name]
    counts = torch.tensor([count for count, _ in lens])
    total = int(counts.sum())

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    columns = -(-max(kv for _, kv in lens) // BLOCK)
    tables = torch.randperm(len(lens) * columns).view(len(lens), columns).int()
    places = [
        int(tables[i, p // BLOCK]) * BLOCK + p % BLOCK
        for i, (count, kv) in enumerate(lens)
        for p in range(kv - count, kv)
    ]
    bounds = torch.cat([torch.zeros(1), counts.cumsum(0)]).int().cuda()
    kv_lens = torch.tensor([kv for _, kv in lens]).int().cuda()
    batch = Ragged(cu_q_lens=bounds, kv_lens=kv_lens, num_singles=int((counts == 1).sum()))
    cache = torch.randn(len(lens) * columns, 1, heads * size * rows, device="cuda").expand(-1, BLOCK, -1)
    states = States(cache, 0, tables.cuda(), torch.tensor(places, device="cuda"), batch)
    strengths = draw(total, heads) if is_delta else None
    keys = draw(total, groups, size), draw(total, groups, size)
    new = Scanned(*keys, draw(total, heads, rows), draw(total, heads) - 2, strengths)
    skip = None if is_delta else torch.randn(heads, device="cuda")
    return new, Decay(-torch.rand(heads, device="cuda"), torch.randn(heads, device="cuda"), skip), states


def error(name: str) -> float:
    """Relative to the reference, of a step with requests of both kinds."""
    new, decay, states = make(name, [(1, 600), (1, 1), (300, 700), (65, 65)])
    other = states._replace(cache=states.cache[:, :1].clone().expand_as(states.cache))
    made, exact = recurrent.scan(new, decay, states).float(), reference.scan(new, decay, other).float()
    kept = (states.cache[:, 0] - other.cache[:, 0]).norm() / other.cache[:, 0].norm()
    return max(float((made - exact).norm() / exact.norm()), float(kept))


def row(name: str, requests: int, tokens: int) -> dict[str, object]:
    """Microseconds of one scan."""
    heads, _, size, rows, _ = MODELS[name]
    new, decay, states = make(name, [(tokens, tokens if tokens > 1 else 300)] * requests)
    took = microseconds([lambda: recurrent.scan(new, decay, states)] * 4)
    moved = 8 * requests * heads * size * rows if tokens == 1 else 0
    moved += 2 * requests * tokens * (2 * heads * rows + new.keys[0].numel() * 2)
    floor = moved / TERABYTES / 1e6
    return {
        "model": name,
        "requests": requests,
        "tokens": tokens,
        "us": round(took, 1),
        "floor": round(floor, 1),
    }


def convolution(channels: int, requests: int, tokens: int) -> dict[str, object]:
    """Microseconds of one convolution over the last four inputs."""
    _, _, states = make("qwen3-next", [(tokens, tokens if tokens > 1 else 300)] * requests)
    x = torch.randn(requests * tokens, channels, device="cuda", dtype=torch.bfloat16)
    conv = Conv(torch.randn(4, channels, device="cuda", dtype=torch.bfloat16), None, True)
    took = microseconds([lambda: recurrent.causal_conv(x, conv, states, None)] * 4)
    return {"convolution": channels, "requests": requests, "tokens": tokens, "us": round(took, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    asked = parser.parse_args()
    for name in MODELS:
        off = error(name)
        print(json.dumps({"model": name, "error": off}), flush=True)
        assert off < 1e-2, (name, off)
        for requests, tokens in ((1, 1), (64, 1), (256, 1), (1, 2048), (1, 8192), (8, 2048)):
            print(json.dumps(row(name, requests, tokens)), flush=True)
    for requests, tokens in ((64, 1), (1, 8192)):
        print(json.dumps(convolution(8192, requests, tokens)), flush=True)
    if not asked.sweep:
        return
    for name, chunk, rows in product(MODELS, (16, 32, 64), (16, 32, 64)):
        chunked_scan.SCAN_CHUNK = chunked_scan._LONG_CHUNK = chunk
        chunked_scan._ROWS = rows
        try:
            took = [row(name, *shape)["us"] for shape in ((1, 8192), (8, 2048))]
            print(json.dumps({"model": name, "chunk": chunk, "rows": rows, "us": took}), flush=True)
        except Exception as failed:
            print(name, chunk, rows, str(failed).splitlines()[0][:90], flush=True)


if __name__ == "__main__":
    main()
