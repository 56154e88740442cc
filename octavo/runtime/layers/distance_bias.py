"""`DistanceBias` has learned a term of scores for each distance between query and key (as T5 introduced)."""

import math

import torch
from torch import Tensor, nn

from octavo.runtime.batch import ForwardBatch
from octavo.runtime.kernels.position_bias import PositionBias, SeenKeys
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.embedding import Embedding

BUCKETS = 32
_MAX_DISTANCE = 128


class DistanceBias(nn.Module):
    """Holds a term per bucket of distances and head, which all layers share."""

    def __init__(self, build: BuildContext, num_heads: int, most: int = 0) -> None:
        """most: every distance has its own bucket, up to so many to both sides; 0 = T5's buckets"""
        super().__init__()
        self.table = Embedding(build.at("table"), 2 * most or BUCKETS, num_heads)
        self._parallel, self._most = build.parallel, most
        self._before = _bucket(-torch.arange(_MAX_DISTANCE + 1), is_causal=True).to(build.device)

    def add_to(self, batch: ForwardBatch) -> None:
        """Let the step's tokens see each other with the terms of this rank's heads."""
        if batch.kv_lens.is_meta:
            return  # there are no lengths, only shapes
        longest = batch.longest_q or len(batch.input_ids)
        distances = torch.arange(1 - longest, longest, device=batch.input_ids.device)
        own = distances.clamp(-self._most, self._most - 1) + self._most
        terms = self._of_heads(own if self._most else _bucket(distances, is_causal=False))
        batch.position_bias = PositionBias(terms.t(), batch.cu_q_lens.tolist())

    def add_causal(self, batch: ForwardBatch) -> None:
        """Let them see earlier ones in the cache with these terms."""
        if not batch.kv_lens.is_meta:
            batch.distance_terms = self._of_heads(self._before)

    def _of_heads(self, buckets: Tensor) -> Tensor:
        terms: Tensor = self.table(buckets).chunk(self._parallel.tp_size, dim=1)[self._parallel.tp_rank]
        return terms


def attend_to(seen: Tensor, batch: ForwardBatch) -> None:
    """Let layers attend to some tokens of each sequence only. seen: [N, length] bool"""
    batch.position_bias = SeenKeys(seen)


def _bucket(distances: Tensor, *, is_causal: bool) -> Tensor:
    """Return the bucket of each distance from query to key: near ones have their own, far ones share."""
    half = BUCKETS if is_causal else BUCKETS // 2
    near, away = half // 2, distances.abs()
    turns = torch.log(away.float() / near) / math.log(_MAX_DISTANCE / near)
    far = (near + (turns.clamp(min=0) * (half - near)).long()).clamp(max=half - 1)
    buckets = torch.where(away < near, away, far)
    return buckets.where(distances <= 0, 0) if is_causal else buckets + half * (distances > 0)
