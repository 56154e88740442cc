"""`LibraryBackend`: attention by an installed library, for those kinds of steps in which it is faster here.

At start, its kernels and those that would be used without it attend over the model's heads, in two shapes of
decoding and two of prompts; what a library plans on the host counts, by its share of a layer. What a
library cannot do, and kinds of steps in which it was no faster, stay with the other back end. Named by the
user, it is used without a measurement.
"""

import statistics
import time
from abc import abstractmethod
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from octavo.base.log import get_logger
from octavo.messages.kv import HeadsKV, KVCacheSpec
from octavo.runtime.attention.paged import PagedBackend
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.kernels.attention import Ragged, Scores
from octavo.runtime.kernels.cache_layout import CacheLayout
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.platforms.platform import Platform

logger = get_logger(__name__)

SHAPES = {"decode": ((8, 1, 1024), (16, 1, 2048)), "prompt": ((1, 2048, 2048), (4, 512, 2048))}
"""By kind of step: requests, new tokens of each, and tokens of each."""
_LEAST_GAIN = 1.03
_BLOCK = 64
_TIMES = 9
_BUSY = 2_000_000
"""Cycles for which the device waits before work is timed, while the host launches it."""


class LibraryBackend(PagedBackend):
    """Asks a library for some kinds of steps, and another back end for all else."""

    kinds: frozenset[str] = frozenset(SHAPES)
    """What the library can do; a measurement leaves those that are faster."""

    def __init__(
        self, platform: Platform, input_precision: InputPrecision, other: PagedBackend | None = None
    ) -> None:
        super().__init__(platform, input_precision)
        self._other = other or PagedBackend(platform, input_precision)

    @staticmethod
    def cannot_serve(spec: KVCacheSpec, platform: Platform) -> str | None:
        """Return what all libraries lack."""
        if platform.device.type != "cuda":
            return "it needs a GPU"
        if not isinstance(spec, HeadsKV):
            return "it keeps no latent vectors and no states"
        if spec.dtype not in ("bfloat16", "float16"):
            return "it takes a KV cache of 16 bits"
        return None

    @staticmethod
    def why_not_tried() -> str:
        """Return why a measurement would take too long; nothing if it would not."""
        return ""

    @abstractmethod
    def attend_by_library(
        self, q: Tensor, cache: Tensor, tables: Tensor, batch: Ragged, scores: Scores
    ) -> Tensor:
        """Attend as PagedAttention does, to earlier tokens. Raises Unsupported for blocks of a wrong size.

        May be captured if every request has one new token.
        """

    def plan(self, batch: ForwardBatch) -> None:
        self._other.plan(batch)

    def attend(
        self, q: Tensor, cache: Tensor, tables: GroupTables, batch: ForwardBatch, scores: Scores
    ) -> Tensor:
        if self._is_for(q, cache, batch, scores):
            return self.attend_by_library(q, cache, tables.block_tables, batch, scores)
        return self._other.attend(q, cache, tables, batch, scores)

    def _is_for(self, q: Tensor, cache: Tensor, batch: Ragged, scores: Scores) -> bool:
        is_decode = len(q) == len(batch.kv_lens)
        kind = "decode" if is_decode else "prompt"
        is_known = is_decode or batch.longest_q > 1  # else a step that is repeated for other requests
        is_plain = scores.is_causal and scores.sinks is None and not scores.keys_only
        return kind in self.kinds and is_known and is_plain and q.dtype == cache.dtype and len(q) > 0

    def measure(self, spec: HeadsKV, num_heads: int, num_layers: int) -> str:
        """Keep the kinds of steps in which the library is faster. Returns the factors, for people."""
        told, faster = [], set()
        for kind in sorted(self.kinds):
            gains = [self._gain(spec, num_heads, num_layers, *shape) for shape in SHAPES[kind]]
            told.append(f"{kind} {' and '.join(f'{gain:.2f}' for gain in gains)}")
            if statistics.geometric_mean(gains) >= _LEAST_GAIN:
                faster.add(kind)
        self.kinds = frozenset(faster)
        return f"{', '.join(told)} times as fast as {type(self._other).__name__}"

    def _gain(
        self, spec: HeadsKV, num_heads: int, num_layers: int, requests: int, new: int, tokens: int
    ) -> float:
        """Return how many times faster the library is. Raises Unsupported."""
        device = self.platform.device
        blocks = requests * tokens // _BLOCK
        cache = CacheLayout(spec, _BLOCK).zeros(blocks, device)
        tables = torch.arange(blocks, dtype=torch.int32, device=device).view(requests, -1)
        q = torch.zeros(requests * new, num_heads, spec.head_dim, dtype=cache.dtype, device=device)
        ends = list(accumulate([new] * requests, initial=0))
        batch = ForwardBatch(
            input_ids=torch.zeros(0, dtype=torch.int64, device=device),
            positions=torch.zeros(0, dtype=torch.int64, device=device),
            cu_q_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            kv_lens=torch.full((requests,), tokens, dtype=torch.int32, device=device),
            num_singles=requests if new == 1 else 0,
            longest_q=new,
            kv_caches=[cache],
            groups=[GroupTables(tables, tables)],
            group_of_layer=[0],
        )
        scores = Scores(spec.head_dim**-0.5, spec.sliding_window)
        own = _milliseconds(lambda: self._other.attend(q, cache, batch.groups[0], batch, scores))
        self._other.plan(batch)

        def attend() -> Tensor:
            return self.attend_by_library(q, cache, tables, batch, scores)

        theirs = _milliseconds(attend)
        self.plan(batch)
        first, second = (_wall_milliseconds(attend, device) for _ in range(2))
        return own / (theirs + max(0.0, first - second) / num_layers)


def _milliseconds(work: Callable[[], object]) -> float:
    event: Any = torch.cuda.Event
    wait: Any = torch.cuda._sleep
    times: list[float] = []
    for _ in range(_TIMES + 2):
        begin, end = (event(enable_timing=True) for _ in range(2))
        wait(_BUSY)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def _wall_milliseconds(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - began)
