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
        out = self.attend(q, cache, tables, batch, scores)
        if (mutual := batch.mutual) is not None and scores.is_causal:
            attend, both = self.platform.kernels.attention.paged_attention, scores._replace(is_causal=False)
            blocks = tables.block_tables[mutual.owners]
            out.index_copy_(0, mutual.rows, attend(q[mutual.rows], cache, blocks, mutual.runs, both))
        return out

    def attend(
        self, q: Tensor, cache: Tensor, tables: GroupTables, batch: ForwardBatch, scores: Scores
    ) -> Tensor:
        """Attend to what is stored; q is normalised and rotated, and contiguous where it was."""
        attend = self.platform.kernels.attention.paged_attention
        return attend(q, cache, tables.block_tables, batch, scores)
