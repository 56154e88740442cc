"""The conformance suite of platforms: `check` compares their kernels with the references, their methods with
what the interface says. Called by name, for `octavo platform-check`.

Inputs are made on the CPU and computed there by the references, in float32.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.attention import HeadInputs, HeadNorms, Ragged, Rotation, Scores
from octavo.runtime.kernels.linear import Packed
from octavo.runtime.kernels.ref.draws import truncate
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.sampling import Draws, Limits
from octavo.runtime.kernels.table import KernelTable
from octavo.runtime.platforms.platform import Platform, get_platform

Bring = Callable[[Any], Any]
"""Brings inputs to the device of a table, and floats to the type of activations."""
Work = Callable[[KernelTable, Bring], Tensor]


class Finding(NamedTuple):
    """What was checked, and what is wrong; empty if nothing is."""

    subject: str
    problem: str = ""


def check(device: str, threads: int) -> Iterator[Finding]:
    """Check the platform of `device`. Raises ConfigError if it cannot be made."""
    platform = get_platform(device, threads)
    yield Finding(f"{type(platform).__name__} on torch's {platform.device}: {platform.machine}")
    for subject, examine in _METHODS.items():
        yield Finding(subject, _tried(partial(examine, platform)))
    for subject, work in _works():
        yield Finding(subject, _tried(partial(_compare, work, platform)))


def _tried(examine: Callable[[], str]) -> str:
    with torch.inference_mode():
        try:
            return examine()
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _memory(platform: Platform) -> str:
    some, more = (platform.available_memory_bytes(share) for share in (0.5, 0.9))
    peak = platform.peak_bytes(lambda: None)
    if not 0 < some <= more:
        return f"available_memory_bytes(0.5) is {some}, of 0.9 it is {more}"
    return "" if peak >= 0 else f"peak_bytes of nothing is {peak}"


def _types(platform: Platform) -> str:
    made = [platform.compute_dtype(dtype) for dtype in (torch.float32, torch.float16)]
    wrong = [dtype for dtype in made if not dtype.is_floating_point]
    return f"compute_dtype is {wrong[0]}" if wrong else ""


def _capture(platform: Platform) -> str:
    """Replay, after the input has changed."""
    if (capture := platform.graph_capture()) is None:
        return ""
    source, target = (torch.zeros(4, device=platform.device) for _ in range(2))

    def work() -> None:
        target.copy_(source + 1)

    work()
    replay = capture(work)
    source.fill_(2.0)
    replay()
    return "" if target.tolist() == [3.0] * 4 else f"a captured step gives {target.tolist()}, not 3"


def _copies(platform: Platform) -> str:
    if (lane := platform.copy_lane()) is None:
        return ""
    host = lane.host_memory(64)
    host.copy_(torch.arange(64, dtype=torch.uint8))
    target = torch.zeros(64, dtype=torch.uint8, device=platform.device)
    lane.copy(target, host)()
    return "" if torch.equal(target.cpu(), host) else "copy_lane copies something else"


_METHODS: dict[str, Callable[[Platform], str]] = {
    "memory": _memory,
    "types": _types,
    "graph_capture": _capture,
    "copy_lane": _copies,
}


def _compare(work: Work, platform: Platform) -> str:
    """Return how far the platform's result is from the reference's, if it is too far."""
    dtype = platform.compute_dtype(torch.float32)

    def bring(value: Any) -> Any:
        widths = {torch.float32: dtype}
        return tree_map_only(Tensor, lambda t: t.to(platform.device, widths.get(t.dtype)), value)

    torch.manual_seed(0)
    expected = work(ref_table(), lambda value: value).float()
    torch.manual_seed(0)
    made = work(platform.kernels, bring).float().cpu()
    if made.shape != expected.shape:
        return f"the shape is {list(made.shape)}, not {list(expected.shape)}"
    error = float((made - expected).abs().max() / expected.abs().max().clamp(min=1e-20))
    allowed = 4 * torch.finfo(dtype).eps ** 0.75
    return "" if error <= allowed else f"off by {error:.2g} of the largest value; {allowed:.2g} is allowed"


def _works() -> Iterator[tuple[str, Work]]:
    for rows in (1, 7, 40):
        yield f"matmul of {rows} rows", partial(_matmul, rows, False)
        yield f"gated_matmul of {rows} rows", partial(_matmul, rows, True)
    for name in ("Q8_0", "Q4_0", "Q4_1"):
        yield f"block_dequantize of {name}", partial(_dequantize, name)
        yield f"block_matmul of {name}", partial(_block_matmul, name)
    yield from {"rms_norm": _rms_norm, "add_norm": _add_norm}.items()
    for kind, gated in product(get_args(Activation), (True, False)):
        yield f"{kind}{', gated' * gated}", partial(_activate, kind, gated)
    for kind, scores in _SCORES.items():
        yield f"attention{kind}", partial(_attend, scores)
    for kind in _CHOICES:
        yield f"choose{kind}", partial(_choose, kind)


def _matmul(rows: int, is_gated: bool, table: KernelTable, to: Bring) -> Tensor:
    x, weight = to((torch.randn(rows, 64), torch.randn(96, 64)))
    return (table.linear.gated_matmul if is_gated else table.linear.matmul)(x, weight)


def _dequantize(name: str, table: KernelTable, to: Bring) -> Tensor:
    return table.linear.block_dequantize(to(_packed(name)))


def _rms_norm(table: KernelTable, to: Bring) -> Tensor:
    return table.norms.rms_norm(to(torch.randn(5, 64)), to(torch.rand(64)), 1e-6)


def _add_norm(table: KernelTable, to: Bring) -> Tensor:
    x, residual, weight = to((torch.randn(5, 64), torch.randn(5, 64), torch.rand(64)))
    return torch.cat(table.norms.add_norm(x, weight, 1e-6, residual))


def _activate(kind: Activation, is_gated: bool, table: KernelTable, to: Bring) -> Tensor:
    return table.activate(to(torch.randn(3, 64)), kind, gated=is_gated)


def _packed(name: str) -> Packed:
    """Return 12 rows of random codes with scales of 2 ** -7."""
    kind = Packed(torch.zeros(1, 0), name).kind
    blocks = torch.randint(0, 256, (12, 8, kind.num_bytes), dtype=torch.uint8)
    heads = torch.full((12, 8, (kind.num_bytes - kind.block // (1 if name == "Q8_0" else 2)) // 2), 2.0**-7)
    blocks[..., : 2 * heads.shape[-1]] = heads.half().view(torch.uint8)
    return Packed(blocks.view(12, -1), name)


def _block_matmul(name: str, table: KernelTable, to: Bring) -> Tensor:
    matrix, x = to((_packed(name), torch.randn(5, 256)))
    if table.linear.arrange is not None:
        matrix = table.linear.arrange(matrix, x.dtype)
    return table.linear.block_matmul(x, matrix)


_SCORES = {
    "": Scores(0.2),
    " with a window": Scores(0.2, sliding_window=7),
    " with a soft cap": Scores(0.2, soft_cap=5.0),
    " to both sides": Scores(0.2, is_causal=False),
}


def _attend(scores: Scores, table: KernelTable, to: Bring) -> Tensor:
    """Store and attend for a decoding request, a prompt, and a chunk, in one batch."""
    q, k, v = (torch.randn(12, heads, 32) for heads in (4, 2, 2))
    angles, weights = torch.randn(12, 16), torch.rand(2, 32)
    new = HeadInputs(q, k, v, Rotation(angles.cos(), angles.sin()), HeadNorms(weights[0], weights[1], 1e-6))
    cache = torch.randn(9, 2, 16, 2, 32)
    tables = torch.tensor([[1, 2, 3], [4, 5, 0], [6, 7, 8]], dtype=torch.int32)
    lens, starts = [33, 5, 20], [0, 1, 6, 12]
    numbers = [end - start for start, end in pairwise(starts)]
    places = [(r, p) for r, n in enumerate(numbers) for p in range(lens[r] - n, lens[r])]
    slots = torch.tensor([int(tables[r, p // 16]) * 16 + p % 16 for r, p in places])
    new, cache, tables, slots = to((new, cache, tables, slots))
    bounds, kv_lens = to((torch.tensor(starts, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)))
    batch = Ragged(cu_q_lens=bounds, kv_lens=kv_lens, num_singles=1, longest_q=6)
    q = table.attention.store_kv(new, cache, slots)
    return table.attention.paged_attention(q, cache, tables, batch, scores)


_CHOICES = "", " at a temperature", " with limits"


def _choose(kind: str, table: KernelTable, to: Bring) -> Tensor:
    """Return the ids that are chosen, the same on every device; with limits, whether they are within."""
    numbers = [torch.tensor(n, dtype=torch.float64) for n in ([0.7] * 4, [0.1, 0.3, 0.6, 0.9])]
    limits = Limits(*(torch.full((4,), n, dtype=torch.float64) for n in (0.7, 20, 0.9, 0.01)))
    logits = torch.randn(4, 501) * 3
    lowest = truncate(logits, limits).values
    if kind != " with limits":
        return table.sampling.choose(to(logits), Draws(*to(numbers)) if kind else None).token_ids
    ids = table.sampling.choose(to(logits.clone()), Draws(*to(numbers)), to(limits)).token_ids.cpu()
    return logits.gather(1, ids[:, None])[:, 0] >= lowest
