"""Attention through the kernel table: two calls per layer for a whole batch, decode and prefill alike.

Serves every platform: the table is compiled C++ on CPU, Triton on an NVIDIA GPU, torch twins elsewhere.
"""

from typing import NamedTuple

from torch import Tensor

from octavo.messages.kv import KVCacheSpec
from octavo.runtime.attention.interface import AttentionBackend
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.kernels.attention import HeadNorms, Rotation
from octavo.runtime.platforms.platform import Platform


class Scores(NamedTuple):
    """How queries and keys are compared; as in kernels.attention.PagedAttention."""

    scale: float
    sliding_window: int
    soft_cap: float


class PagedBackend(AttentionBackend):
    """Cache tensors as in kernels.cache_layout."""

    @staticmethod
    def supports(spec: KVCacheSpec, platform: Platform) -> str | None:
        """Everything: the kernels take any number of heads and any head_dim."""
        del spec, platform
        return None

    def plan(self, batch: ForwardBatch) -> None:
        """Nothing to prepare: the kernels read the batch as it is."""

    def run(  # noqa: PLR0913  # what attention is made of
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        tables: GroupTables,
        batch: ForwardBatch,
        *,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
        rotation: Rotation | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """See AttentionBackend.run."""
        q = self.platform.kernels.attention.store_kv(
            q, k, v, cache, tables.slots, rotation=rotation, norms=norms
        )
        how = Scores(scale, sliding_window, soft_cap)
        return self.attend(q, cache, tables, batch, how)

    def attend(
        self, q: Tensor, cache: Tensor, tables: GroupTables, batch: ForwardBatch, how: Scores
    ) -> Tensor:
        """Attend to what is stored; q is normalised and rotated, and contiguous where it was."""
        return self.platform.kernels.attention.paged_attention(
            q,
            cache,
            tables.block_tables,
            batch.cu_q_lens,
            batch.kv_lens,
            num_singles=batch.num_singles,
            common_start=batch.common_start,
            activations=self.activations,
            **how._asdict(),
        )
