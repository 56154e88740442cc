"""Attention by the package flash-attn (https://github.com/Dao-AILab/flash-attention), versions 2 and 3.

Version 3 (`flash_attn_interface`, Hopper) takes blocks of any size; version 2 takes blocks of 256 slots only.
Both read lengths and block tables on the device, so decoding may be captured.
"""

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from octavo.base.errors import Unsupported
from octavo.messages.kv import HeadsKV, KVCacheSpec
from octavo.runtime.attention.library import LibraryBackend
from octavo.runtime.attention.paged import PagedBackend
from octavo.runtime.kernels.attention import Ragged, Scores
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.platforms.platform import Platform

_LARGEST_HEAD = 256
_BLOCK_OF_VERSION_2 = 256


class FlashAttentionBackend(LibraryBackend):
    """Calls `flash_attn_with_kvcache` of version 3, else `flash_attn_varlen_func` of version 2."""

    def __init__(
        self, platform: Platform, input_precision: InputPrecision, other: PagedBackend | None = None
    ) -> None:
        super().__init__(platform, input_precision, other)
        self._of_3: Any = None
        self._of_2: Any = None
        if _is_hopper(platform) and importlib.util.find_spec("flash_attn_interface"):
            self._of_3 = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
        else:
            self._of_2 = importlib.import_module("flash_attn").flash_attn_varlen_func

    @staticmethod
    def supports(spec: KVCacheSpec, platform: Platform) -> str | None:
        """Serve causal attention over 16-bit caches, with heads of up to 256 by eights, from Ampere on."""
        if reason := LibraryBackend.cannot_serve(spec, platform):
            return reason
        if torch.cuda.get_device_capability(platform.device)[0] < 8:
            return "it needs an NVIDIA GPU of compute capability 8.0 or more"
        has_3 = _is_hopper(platform) and importlib.util.find_spec("flash_attn_interface")
        if not has_3 and importlib.util.find_spec("flash_attn") is None:
            return "the package flash-attn is not installed"
        assert isinstance(spec, HeadsKV)
        if spec.head_dim % 8 or spec.head_dim > _LARGEST_HEAD:
            return f"it takes heads of up to {_LARGEST_HEAD}, by eights; not of {spec.head_dim}"
        return None

    def attend_by_library(
        self, q: Tensor, cache: Tensor, tables: Tensor, batch: Ragged, scores: Scores
    ) -> Tensor:
        keys, values = cache.unbind(1)
        window = (scores.sliding_window - 1, 0) if scores.sliding_window else (-1, -1)
        how = {
            "softmax_scale": scores.scale,
            "causal": True,
            "window_size": window,
            "softcap": scores.soft_cap,
        }
        longest_q = 1 if len(q) == len(batch.kv_lens) else batch.longest_q
        if self._of_3 is not None:
            made: Tensor = self._of_3(
                q.contiguous(),
                keys,
                values,
                cache_seqlens=batch.kv_lens,
                page_table=tables,
                cu_seqlens_q=batch.cu_q_lens,
                max_seqlen_q=longest_q,
                **how,
            )
            return made
        if cache.shape[2] % _BLOCK_OF_VERSION_2:
            raise Unsupported(
                f"flash_attn: version 2 takes blocks of {_BLOCK_OF_VERSION_2} slots, or several times as "
                f"many, not of {cache.shape[2]}: use block_size={_BLOCK_OF_VERSION_2}."
            )
        ends = functional.pad(batch.kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
        most = tables.shape[1] * cache.shape[2]
        given = q.contiguous(), keys, values, batch.cu_q_lens, ends, longest_q, most
        of_2: Tensor = self._of_2(*given, block_table=tables, **how)
        return of_2


def _is_hopper(platform: Platform) -> bool:
    return torch.cuda.get_device_capability(platform.device)[0] == 9
