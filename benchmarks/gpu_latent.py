"""Latent attention (MLA) on a GPU: checks the kernels against the reference, then times them.

python -m benchmarks.gpu_latent [--sweep]

Bytes are those of the cached vectors, read once; the least time is that at 4.3 TB/s. A sweep tries tiles.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu_quantized import microseconds
from octavo.runtime.kernels.attention import PlainPrompts, Ragged, Scores
from octavo.runtime.kernels.ref.cache import paged_attention as reference
from octavo.runtime.kernels.triton import latent
from octavo.runtime.kernels.triton.table import cuda_table

_ROPE, _LATENT, _BLOCK = 64, 512, 64
_SIZE = _ROPE + _LATENT
_SCORES = Scores(192**-0.5, keys_only=_ROPE)
_L2 = 200 << 20  # so many bytes of cache do not stay in it
_TABLE = cuda_table().attention
_ATTEND, _PROMPTS = _TABLE.paged_attention, _TABLE.latent_prompts
DECODES = [(16, 1, 8192), (16, 8, 8192), (16, 32, 8192), (16, 128, 2048), (16, 256, 1024), (128, 1, 8192)]
DECODES += [(128, 32, 8192), (128, 128, 2048)]
PROMPTS = [(16, 2048, 2048), (16, 8192, 8192), (16, 512, 8192), (128, 2048, 2048)]


def make(heads: int, requests: int, new: int, kv: int) -> tuple[Any, ...]:
    """Arguments of one call: random vectors, blocks in random order."""
    width = -(-kv // _BLOCK)
    cache = torch.randn(requests * width, 1, _BLOCK, 1, _SIZE, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(requests * width, device="cuda").int().view(requests, width)
    q = torch.randn(requests * new, heads, _SIZE, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * new
    lens = torch.full((requests,), kv, device="cuda", dtype=torch.int32)
    return q, cache, tables, Ragged(cu_q_lens=starts, kv_lens=lens)


def error(heads: int, requests: int, new: int, kv: int) -> float:
    """Relative to the reference in float32 of the same numbers."""
    given = make(heads, requests, new, kv)
    made = _ATTEND(*given, _SCORES)[..., _ROPE:].float()
    exact = reference(given[0].float(), *given[1:], _SCORES)[..., _ROPE:]
    return float((made - exact).norm() / exact.norm())


def attention(heads: int, requests: int, new: int, kv: int) -> float:
    """Microseconds of a call; each has a cache of its own, as many as L2 does not hold."""
    number = max(2, _L2 // (requests * kv * _SIZE * 2))
    given = [make(heads, requests, new, kv) for _ in range(number)]
    return microseconds([lambda call=call: _ATTEND(*call, _SCORES) for call in given])


def plain_prompt(heads: int, tokens: int) -> float:
    """Microseconds of the plain form, checked against torch's attention."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    starts = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    sizes = (draw(tokens, heads, 192), draw(tokens, heads, _SIZE)[..., :_ROPE], draw(tokens, heads, 256))
    prompts = PlainPrompts(*sizes, draw(tokens, _SIZE)[:, :_ROPE], starts, 192**-0.5)
    out = torch.full((tokens, heads, 128), torch.nan, device="cuda", dtype=torch.bfloat16)
    q = torch.cat([prompts.q[..., :128], prompts.q_rope], -1)
    k = torch.cat([prompts.made[..., :128], prompts.k_rope[:, None].expand(-1, heads, -1)], -1)
    _PROMPTS(prompts, out)
    given = (tensor.transpose(0, 1)[None] for tensor in (q, k, prompts.made[..., 128:]))
    exact = functional.scaled_dot_product_attention(*given, is_causal=True)[0].transpose(0, 1)
    assert (out - exact).norm() < 1e-2 * exact.norm()
    return microseconds([lambda: _PROMPTS(prompts, out)] * 4)


def report(shapes: list[tuple[int, int, int, int]], label: str = "") -> None:
    cells = []
    for heads, requests, new, kv in shapes:
        took = attention(heads, requests, new, kv)
        pairs = requests * new * (kv - (new - 1) / 2)
        rate = requests * kv * _SIZE * 2 / took / 1e6
        speed = pairs * heads * 2 * (_SIZE + _LATENT) / took / 1e6
        cells.append(f"{heads}h {requests}x{new}/{kv}: {took:.1f} us {rate:.2f} TB/s {speed:.0f} TF")
    print(label, " | ".join(cells), flush=True)


def sweep() -> Iterator[tuple[int, dict[str, int], int]]:
    for tile_k, warps, stages, programs in (
        (32, 4, 3, 528),
        (32, 4, 4, 264),
        (32, 8, 3, 264),
        (64, 4, 2, 264),
        (64, 4, 3, 132),
        (64, 8, 2, 264),
        (64, 8, 3, 132),
        (16, 4, 4, 528),
        (16, 2, 4, 528),
        (32, 2, 3, 528),
    ):
        yield 16, {"TILE_M": 16, "TILE_K": tile_k, "num_warps": warps, "num_stages": stages}, programs
    for tile_m, tile_k, stages in ((64, 32, 2), (64, 64, 2), (64, 64, 3), (32, 32, 3)):
        yield 128, {"TILE_M": tile_m, "TILE_K": tile_k, "num_warps": 8, "num_stages": stages}, 264


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    asked = parser.parse_args()
    for shape in ((16, 5, 1, 3000), (128, 3, 1, 700), (16, 2, 300, 900), (20, 1, 65, 65)):
        off = error(*shape)
        assert off < 1e-2, (shape, off)
        print(f"{shape}: off by {off:.1e}")
    report([(heads, requests, 1, kv) for heads, requests, kv in DECODES])
    report([(heads, 1, new, kv) for heads, new, kv in PROMPTS])
    for heads, tokens in ((16, 2048), (16, 8192), (128, 2048)):
        took = plain_prompt(heads, tokens)
        print(
            f"plain {heads}h {tokens}: {took:.1f} us {heads * tokens**2 * 320 / took / 1e6:.0f} TF",
            flush=True,
        )
    if asked.sweep:
        for heads, tile, programs in sweep():
            latent.decode_tiles = lambda shapes, tile=tile: tile
            latent._PROGRAMS = programs
            try:
                report([(heads, n, 1, kv) for h, n, kv in DECODES if h == heads], f"{tile} {programs}")
            except Exception as failed:
                print(tile, programs, str(failed).splitlines()[0][:80])


if __name__ == "__main__":
    main()
