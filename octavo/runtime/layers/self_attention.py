"""`SelfAttention` has several heads; a `HeadsArch` describes it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from octavo.config.resolve_parallel import check_context
from octavo.messages.kv import KVCacheSpec
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.kernels.attention import HeadInputs, HeadNorms
from octavo.runtime.kernels.cache_layout import make_spec
from octavo.runtime.kernels.recurrent import GateForm
from octavo.runtime.layers.attention import Attention, check_heads
from octavo.runtime.layers.build import BuildContext, Layer
from octavo.runtime.layers.linear import QKVLinear, RowLinear
from octavo.runtime.layers.norm import AllHeadsRMSNorm, HeadLayerNorm, Norm, NormArch, RMSNorm, make_norm
from octavo.runtime.layers.positions import QueryFactors, QueryScale
from octavo.runtime.layers.rotary import RotaryEmbedding
from octavo.runtime.layers.rows import make_row_gather
from octavo.runtime.quantization.method import Term
from octavo.runtime.quantization.parameter import Layout

_BY_SIGMOID = GateForm(sigmoid=True)


@dataclass(frozen=True, kw_only=True)
class HeadsArch:
    """Queries in `num_heads` heads attend to keys and values in `num_kv_heads`.

    qk_norm: normalise each head of queries and keys, with weights that all heads share ("head"), or that each
             has its own, or without ("unit"); or all heads as one vector
    sinks:   each head has a score that joins its softmax, learned
    chunk:   positions attend to those of their own chunk of so many; 0 = off
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float = 0.0
    is_causal: bool = True
    """Otherwise tokens see later ones, too, and nothing is kept between steps."""
    qk_norm: Literal["none", "unit", "head", "each_head", "all_heads"] = "none"
    norms_rotated: bool = False
    """Norms of single heads follow the rope instead of preceding it."""
    query_scale: QueryScale | None = None
    chunk: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    has_gate: bool = False
    """What a head has seen is multiplied by the sigmoid of a gate, which is projected behind queries."""

    def kv_spec(self, tp_size: int, dtype: torch.dtype, sliding_window: int = 0) -> KVCacheSpec:
        """Return the cache of one rank, in numbers of this type. Raises ConfigError, Unsupported."""
        check_heads(self.num_heads, tp_size)
        window = self.chunk or sliding_window
        return make_spec(max(self.num_kv_heads // tp_size, 1), self.head_dim, dtype, window)


class AttentionSetting(NamedTuple):
    """What a layer tells its attention, beside the arch. norm: of queries and keys

    sliding_window: positions a query sees, 0 = all; input_size: width of what it reads, 0 = as it writes
    """

    norm: NormArch
    rotary: RotaryEmbedding | None = None
    sliding_window: int = 0
    input_size: int = 0


class SelfAttention(nn.Module):
    """Computes qkv → norms of queries and keys → rope → attention over the cache → out."""

    def __init__(
        self, arch: HeadsArch, build: BuildContext, layer_id: int, size: int, setting: AttentionSetting
    ) -> None:
        super().__init__()
        norm = setting.norm
        heads, kv_heads, head_dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
        self._head_dim = head_dim
        self._rotary = setting.rotary
        self._gather = make_row_gather(build)
        sizes = setting.input_size or size, heads, kv_heads, head_dim
        self.qkv = QKVLinear(build.at("qkv"), *sizes, arch.qkv_bias, arch.has_gate)
        self._heads = (self.qkv.num_heads, self.qkv.num_kv_heads, self.qkv.num_kv_heads)
        self._num_gates = self.qkv.num_heads // 2 if arch.has_gate else 0
        self._multiply = build.kernels.recurrent.gate
        self._fused_norms, self._has_norms = None, arch.qk_norm != "none"
        self._factors = QueryFactors(arch.query_scale, build) if arch.query_scale else None
        if arch.qk_norm == "unit":
            ones = torch.ones(head_dim, dtype=build.compute_dtype, device=build.device)
            self._fused_norms = HeadNorms(ones, ones, norm.eps)
        elif self._has_norms:
            self.q_norm = _make_head_norm(arch, norm, build.at("q_norm"), heads)
            self.k_norm = _make_head_norm(arch, norm, build.at("k_norm"), kv_heads)
            if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
                # One kernel applies them on the way into the cache.
                weights = self.q_norm.weight, self.k_norm.weight
                self._fused_norms = HeadNorms(*weights, norm.eps, arch.norms_rotated)
        if arch.is_causal and not setting.sliding_window:
            check_context(kv_heads, build.parallel.tp_size, build.parallel.dcp.size)
        kv_dtype = build.kv_dtype if arch.is_causal else build.step_dtype or build.compute_dtype
        spec = arch.kv_spec(build.parallel.tp_size, kv_dtype, setting.sliding_window)
        self.sinks = _Sinks(build.at("sinks"), heads) if arch.sinks else None
        self.attention = Attention(
            build,
            layer_id,
            spec,
            scale=arch.scale,
            soft_cap=arch.soft_cap,
            is_causal=arch.is_causal,
            sinks=self.sinks.weight if self.sinks else None,
        )
        if arch.chunk:
            self.attention.see_chunks(arch.chunk)
        self.out = RowLinear(build.at("out"), heads * head_dim, size, arch.out_bias)

    def forward(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        """Map [T, size] to [T, size], or to these rows of it."""
        out: Tensor = self.out(self._attend(x, batch, rows))
        return out

    def defer(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Term:
        """Return `forward` as a term for an RMS norm that adds it."""
        return self.out.defer(self._attend(x, batch, rows))

    def keep(self, x: Tensor, batch: ForwardBatch) -> None:
        """Store keys and values of inputs that nobody attends for; norms, if any, are of single heads."""
        rotation = self._rotary.rotation(batch) if self._rotary else None
        self.attention.keep(HeadInputs(*self._split(x), rotation, self._fused_norms), batch)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self._head_dim)).split(self._heads, dim=1)
        return q, k, v

    def _attend(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None) -> Tensor:
        q, k, v = self._split(x)
        gates, count = q, self._num_gates
        if count:
            q, gates = q[:, :count], q[:, count:].flatten(1)
        if self._has_norms and self._fused_norms is None:
            q, k = self.q_norm(q), self.k_norm(k)
        rotation = self._rotary.rotation(batch) if self._rotary else None
        factors = self._factors.of_step(batch) if self._factors else None
        seen = self.attention(q, k, v, batch, rotation, self._fused_norms, factors)
        return self._gather(self._multiply(seen, gates, _BY_SIGMOID) if count else seen, rows)


class _Sinks(Layer):
    """Keeps a score for each head of this rank."""

    def __init__(self, build: BuildContext, num_heads: int) -> None:
        super().__init__()
        layout = Layout((build.split("", num_heads),))
        self.weight = self.make_vector(build, layout, "weight", torch.float32)


def _make_head_norm(arch: HeadsArch, norm: NormArch, build: BuildContext, num_heads: int) -> Norm:
    """Return the norm of `num_heads` heads of queries or keys, of [T, heads of this rank, head_dim]."""
    if arch.qk_norm == "each_head":
        return HeadLayerNorm(build, num_heads, arch.head_dim, norm.eps)
    if arch.qk_norm == "all_heads":
        return AllHeadsRMSNorm(build, num_heads, arch.head_dim, norm.eps)
    return make_norm(norm, build, arch.head_dim)
