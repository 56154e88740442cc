"""`Attention` is where a model meets the KV cache. It owns scale, window, soft cap and the cache's spec."""

import torch
from torch import Tensor, nn

from octavo.base.errors import ConfigError
from octavo.messages.kv import KVCacheSpec
from octavo.runtime.attention.step_cache import step_cache
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.kernels.attention import HeadInputs, HeadNorms, Rotation, Scores
from octavo.runtime.kernels.cache_layout import CacheLayout
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.positions import within_chunks


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
        is_causal: bool = True,
        keys_only: int = 0,
        sinks: Tensor | None = None,
    ) -> None:
        """spec: of what is kept; for its step only, where all tokens see each other; the rest as in Scores"""
        super().__init__()
        self.layer_id, self.is_causal = layer_id, is_causal
        self.kv_spec = spec
        self._kv_scales: tuple[float, float] | None = None
        self._backend, self._kernels = build.attention.of_layers(spec), build.kernels.attention
        is_exact = spec.dtype == "float32" and not (is_causal or build.splits_floats)
        precision: InputPrecision = "float32" if is_exact else build.attention.input_precision
        self._scores = Scores(scale, spec.sliding_window, soft_cap, precision, is_causal, keys_only, sinks)
        self._chunk = 0

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        rotation: Rotation | None = None,
        norms: HeadNorms | None = None,
        q_factors: Tensor | None = None,
    ) -> Tensor:
        """Attend: [T, num_heads * head_dim]. The arguments are those of HeadInputs."""
        if (bias := batch.position_bias) is not None:
            return bias.attend(q, k, v, self._scores.scale).flatten(1)
        if (terms := batch.distance_terms) is not None:
            cache, tables = batch.kv_caches[self.layer_id], batch.tables(self.layer_id)
            q = self._kernels.store_kv(HeadInputs(q, k, v), cache, tables.slots)
            how = tables.block_tables, batch, terms, self._scores.scale
            return self._kernels.distance_attention(q, cache, *how).flatten(1)
        if self._kv_scales is not None:
            k_scale, v_scale = self._kv_scales
            v = v / v_scale
            if norms is None:
                k = k / k_scale
            else:
                norms = norms._replace(k_weight=norms.k_weight / k_scale)
        new, layer_id, seen = HeadInputs(q, k, v, rotation, norms, q_factors), self.layer_id, None
        if self.is_causal:
            cache, tables = batch.kv_caches[layer_id], batch.tables(layer_id)
            if self._chunk:
                group = batch.group_of_layer[layer_id]
                cut = self._kernels.cut_chunks
                tables, batch = within_chunks(batch, group, self._chunk, cache.shape[2], cut)
        elif (seen := self._kernels.packed_attention(new, batch, self._scores)) is None:
            cache, tables = step_cache(batch, self.kv_spec)
        if seen is None:
            seen = self._backend.run(new, cache, tables, batch, self._scores)
        seen = seen.flatten(1)
        return seen if self._kv_scales is None else seen * self._kv_scales[1]

    def see_chunks(self, size: int) -> None:
        """Let tokens see no chunk of so many positions but their own, which the cache's window covers."""
        self._chunk, self._scores = size, self._scores._replace(sliding_window=0)

    def use_kv_scales(self, keys: float, values: float) -> None:
        """Store keys and values divided by these numbers, as a narrow cache needs it."""
        self._kv_scales = keys, values
        self._scores = self._scores._replace(scale=self._scores.scale * keys)

    @property
    def has_kv_scales(self) -> bool:
        """Return True after `use_kv_scales`."""
        return self._kv_scales is not None

    @property
    def scale(self) -> float:
        """Return what scores are multiplied by."""
        return self._scores.scale

    def keep(self, new: HeadInputs, batch: ForwardBatch) -> Tensor:
        """Store without attending; return the new q."""
        cache = batch.kv_caches[self.layer_id]
        slots = self._backend.slots(batch.tables(self.layer_id), cache, batch)
        return self._kernels.store_kv(new, cache, slots)

    def store(self, new: HeadInputs, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """See AttentionBackend.store."""
        cache = batch.kv_caches[self.layer_id]
        return self._backend.store(new, cache, batch.tables(self.layer_id), batch)

    def attend_singles(self, q: Tensor, batch: ForwardBatch) -> Tensor:
        """See AttentionBackend.attend_singles."""
        cache, tables = batch.kv_caches[self.layer_id], batch.tables(self.layer_id)
        return self._backend.attend_singles(q, cache, tables, batch, self._scores)


def make_cache(spec: KVCacheSpec, num_blocks: int, block_size: int, device: torch.device) -> Tensor:
    """Return a new cache for one layer, without the engine's pool of blocks."""
    return CacheLayout(spec, block_size).zeros(num_blocks, device)


def check_heads(num_heads: int, tp_size: int) -> None:
    """Raise ConfigError unless every rank gets the same number of heads."""
    if num_heads % tp_size:
        raise ConfigError(
            f"Total number of attention heads ({num_heads}) must be divisible by tensor parallel size "
            f"({tp_size}): choose another tensor_parallel_size."
        )
