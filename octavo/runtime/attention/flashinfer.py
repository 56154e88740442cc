"""Attention of prompts by the package flashinfer-python (https://github.com/flashinfer-ai/flashinfer).

Its cache has the layout of ours ("NHD"). It plans each step on the host, from lengths that are on the device:
a step of prompts waits for those before it, and captured steps, which decode, cannot use it.
"""

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from octavo.messages.kv import HeadsKV, KVCacheSpec
from octavo.runtime.attention.library import LibraryBackend
from octavo.runtime.attention.paged import PagedBackend
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.kernels.attention import Ragged, Scores
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.platforms.platform import Platform

_WORKSPACE_BYTES = 128 << 20
_HEADS = (64, 128, 256)


class FlashInferBackend(LibraryBackend):
    """Plans once per step, table, and way to score; layers that share them run by that plan."""

    kinds = frozenset({"prompt"})

    def __init__(
        self, platform: Platform, input_precision: InputPrecision, other: PagedBackend | None = None
    ) -> None:
        super().__init__(platform, input_precision, other)
        self._new = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=platform.device)
        self._of_step: dict[Any, Any] = {}

    @staticmethod
    def supports(spec: KVCacheSpec, platform: Platform) -> str | None:
        """Serve causal attention over 16-bit caches with heads of 64, 128 or 256, from Turing on."""
        if reason := LibraryBackend.cannot_serve(spec, platform):
            return reason
        if torch.version.hip is not None:
            return "it needs an NVIDIA GPU"
        if importlib.util.find_spec("flashinfer") is None:
            return "the package flashinfer-python is not installed"
        assert isinstance(spec, HeadsKV)
        if spec.head_dim not in _HEADS:
            return f"it takes heads of {', '.join(map(str, _HEADS))}; not of {spec.head_dim}"
        return None

    @staticmethod
    def why_not_tried() -> str:
        """Name what would be compiled, for minutes, at a start that nobody expects it of."""
        if importlib.util.find_spec("flashinfer_jit_cache") is None:
            return "its kernels would have to be compiled: install flashinfer-jit-cache, or name it"
        return ""

    def plan(self, batch: ForwardBatch) -> None:
        super().plan(batch)
        self._of_step.clear()

    def attend_by_library(
        self, q: Tensor, cache: Tensor, tables: Tensor, batch: Ragged, scores: Scores
    ) -> Tensor:
        key = id(tables), *scores[:3], q.shape[1]
        if key not in self._of_step:
            self._of_step[key] = self._planned(q, cache, tables, batch, scores)
        made: Tensor = self._of_step[key].run(q.contiguous(), cache)
        return made

    def _planned(self, q: Tensor, cache: Tensor, tables: Tensor, batch: Ragged, scores: Scores) -> Any:
        block_size, kv_lens = cache.shape[2], batch.kv_lens.cpu()
        counts = -(-kv_lens // block_size)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
        used = torch.arange(tables.shape[1], device=tables.device) < counts.to(tables.device)[:, None]
        wrapper = self._new(self._workspace, "NHD")
        wrapper.plan(
            batch.cu_q_lens.cpu(),
            ends,
            tables[used],
            (kv_lens - 1) % block_size + 1,
            q.shape[1],
            cache.shape[3],
            q.shape[2],
            block_size,
            causal=True,
            sm_scale=scores.scale,
            window_left=scores.sliding_window - 1 if scores.sliding_window else -1,
            logits_soft_cap=scores.soft_cap or None,
            q_data_type=q.dtype,
            kv_data_type=cache.dtype,
        )
        return wrapper
