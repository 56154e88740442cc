"""Attention is two calls of kernels per layer for a whole batch, decode and prefill alike.

On every platform: the table is compiled C++ on CPU, Triton on an NVIDIA GPU, torch references elsewhere.
"""

from torch import Tensor

from octavo.runtime.attention.interface import AttentionBackend
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.kernels.attention import HeadInputs, Scores


class PagedBackend(AttentionBackend):
    """Works over cache tensors as in kernels.cache_layout, of any number of heads and any head_dim."""

    def run(
        self, new: HeadInputs, cache: Tensor, tables: GroupTables, batch: ForwardBatch, scores: Scores
    ) -> Tensor:
        q = self.platform.kernels.attention.store_kv(new, cache, tables.slots)
        return self.attend(q, cache, tables, batch, scores)

    def attend(
        self, q: Tensor, cache: Tensor, tables: GroupTables, batch: ForwardBatch, scores: Scores
    ) -> Tensor:
        """Attend to what is stored; q is normalised and rotated, and contiguous where it was."""
        attend = self.platform.kernels.attention.paged_attention
        return attend(q, cache, tables.block_tables, batch, scores)
