"""Llama 4 (text) has experts whose inputs are weighed, attention in chunks, and layers that do not rotate.

These see the whole context, with queries that grow with their position.
"""

from dataclasses import replace

from octavo.runtime.layers.experts import Router
from octavo.runtime.layers.positions import QueryScale
from octavo.runtime.models import experts
from octavo.runtime.models.arch import Arch, Config, factor_of, read_arch, read_dense, read_heads, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.smollm3 import rotated_layers
from octavo.runtime.models.weights import to

_DEFAULTS: Config = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_experts_per_tok": 1}


class Llama4(Decoder):
    """Each layer with experts has one that all tokens share."""

    WEIGHTS = Decoder.WEIGHTS.replace(
        {
            "layers.*.feed_forward.gate_proj": to("layers.*.mlp.up", "gate"),
            "layers.*.feed_forward.up_proj": to("layers.*.mlp.up", "up"),
            "layers.*.feed_forward.down_proj": to("layers.*.mlp.down"),
            "layers.*.feed_forward.router": to("layers.*.mlp.router"),
            **experts.stacked_by_inputs("layers.*.feed_forward.experts"),
        }
        | experts.shared("layers.*.feed_forward.shared_expert")
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Norms of queries and keys have no weights, and are on layers that rotate, as chunks are."""
        config = _DEFAULTS | config | {"layer_types": None, "sliding_window": None}
        shared = read_dense(config)
        router = Router(experts.top_k_of(config), "sigmoid")
        feed_forward = experts.read_experts(config, router, weighs_inputs=True, shared=shared)
        longest, chunk = _longest(config), size_of(config, "attention_chunk_size", 8192)
        norm = "unit" if config.get("use_qk_norm", True) else "none"
        local = read_heads(config, qk_norm=norm, chunk=chunk if chunk < longest else 0)
        whole = read_heads(config, query_scale=_query_scale(config, longest))
        arch = read_arch(config, attention=local, feed_forward=feed_forward, interleaved_rope=True)
        pairs = zip(arch.layers, rotated_layers(config), strict=True)
        layers = tuple(y if rotates else replace(y, rope=None, attention=whole) for y, rotates in pairs)
        step = size_of(config, "interleave_moe_layer_step", 1)
        sparse = config.get("moe_layers") or range(step - 1, len(layers), step)
        dense = config | {"intermediate_size": config.get("intermediate_size_mlp", 16384)}
        return experts.with_dense_layers(dense, replace(arch, layers=layers), lambda i: i not in sparse)


def _longest(config: Config) -> int:
    return config.get("max_model_len") or size_of(config, "max_position_embeddings", 4096 * 32)


def _query_scale(config: Config, longest: int) -> QueryScale | None:
    unit = size_of(config, "floor_scale", 8192)
    if not config.get("attn_temperature_tuning", True) or longest < unit:
        return None
    return QueryScale(factor=factor_of(config, "attn_scale", 0.1), unit=unit, longest=longest, shift=1)
