"""`Attention` is where a model meets the KV cache. It owns scale, window, soft cap and the cache's spec."""

import torch
from torch import Tensor, nn

from octavo.messages.kv import KVCacheSpec
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.kernels.attention import HeadInputs, HeadNorms, Rotation, Scores
from octavo.runtime.kernels.cache_layout import CacheLayout
from octavo.runtime.layers.build import BuildContext


class Attention(nn.Module):
    """Lets this rank's heads attend to what the cache holds and this step adds."""

    def __init__(
        self,
        build: BuildContext,
        layer_id: int,
        spec: KVCacheSpec,
        *,
        scale: float,
        soft_cap: float = 0.0,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.kv_spec = spec
        self._backend = build.attention
        self._scores = Scores(scale, spec.sliding_window, soft_cap, build.attention.input_precision)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        rotation: Rotation | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Attend: [T, num_heads * head_dim]. The arguments are those of HeadInputs."""
        new, layer_id = HeadInputs(q, k, v, rotation, norms), self.layer_id
        cache, tables = batch.kv_caches[layer_id], batch.tables(layer_id)
        return self._backend.run(new, cache, tables, batch, self._scores).flatten(1)


def make_cache(spec: KVCacheSpec, num_blocks: int, block_size: int, device: torch.device) -> Tensor:
    """Return a new cache for one layer, without the engine's pool of blocks."""
    return CacheLayout(spec, block_size).zeros(num_blocks, device)
