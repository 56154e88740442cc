"""Attention layers reach the paged cache by an `AttentionBackend`; each way of doing it is one.

Layers call `run`, the model runner calls `plan` once per step.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from octavo.messages.kv import KVCacheSpec
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.kernels.attention import HeadInputs, Ragged, Scores
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.platforms.platform import Platform


class AttentionBackend(ABC):
    """Writes new keys and values into the cache and attends over it, in `input_precision`."""

    def __init__(self, platform: Platform, input_precision: InputPrecision = "float32") -> None:
        self.platform = platform
        self.input_precision = input_precision

    @staticmethod
    def supports(spec: KVCacheSpec, platform: Platform) -> str | None:
        """Return the reason why this back end cannot serve such layers there; None, as here, if it can."""
        return None

    def of_layers(self, spec: KVCacheSpec) -> "AttentionBackend":
        """Return what serves such layers."""
        return self

    def slots(self, tables: GroupTables, cache: Tensor, batch: ForwardBatch) -> Tensor:
        """Return where this rank keeps the step's tokens in `cache`, as in StoreKV."""
        return tables.slots

    def store(
        self, new: HeadInputs, cache: Tensor, tables: GroupTables, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """Store without attending: the new q, and what a latent cache has of the step's tokens, [T, D]."""
        q = self.platform.kernels.attention.store_kv(new, cache, tables.slots)
        return q, cache.view(-1, cache.shape[-1])[tables.slots].to(q.dtype)

    def attend_singles(
        self, q: Tensor, cache: Tensor, tables: GroupTables, batch: ForwardBatch, scores: Scores
    ) -> Tensor:
        """Attend for the requests with one new token, which stand first in the batch: q is theirs."""
        keys = Ragged(cu_q_lens=batch.cu_q_lens[: len(q) + 1], kv_lens=batch.kv_lens[: len(q)])
        attend = self.platform.kernels.attention.paged_attention
        return attend(q, cache, tables.block_tables[: len(q)], keys, scores)

    def plan(self, batch: ForwardBatch) -> None:
        """Do the host's work that all layers of a step share, if there is any; before the first layer."""

    @abstractmethod
    def run(
        self, new: HeadInputs, cache: Tensor, tables: GroupTables, batch: ForwardBatch, scores: Scores
    ) -> Tensor:
        """Normalise and rotate q and k, store k and v, attend; returns [T, num_heads, head_dim].

        cache, tables: those of the layer
        """
