"""Llama 4 (text) has experts whose inputs are weighed, and layers that do not rotate.

Attention in chunks, and scores that grow with the position behind them, are not there: contexts end before.
"""

from dataclasses import replace

from octavo.base.errors import Unsupported
from octavo.runtime.layers.experts import Router
from octavo.runtime.models import experts
from octavo.runtime.models.arch import Arch, Config, read_arch, read_dense, read_heads, size_of
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
        """Norms of queries and keys have no weights, and are on layers that rotate.

        Raises Unsupported for a max_model_len beyond the first chunk.
        """
        config = _DEFAULTS | config
        _check_length(config)
        config |= {"layer_types": None, "sliding_window": None}
        shared = read_dense(config)
        router = Router(experts.top_k_of(config), "sigmoid")
        feed_forward = experts.read_experts(config, router, weighs_inputs=True, shared=shared)
        heads = read_heads(config)
        normed = replace(heads, qk_norm="unit") if config.get("use_qk_norm", True) else heads
        arch = read_arch(config, attention=normed, feed_forward=feed_forward, interleaved_rope=True)
        pairs = zip(arch.layers, rotated_layers(config), strict=True)
        layers = tuple(y if rotates else replace(y, rope=None, attention=heads) for y, rotates in pairs)
        step = size_of(config, "interleave_moe_layer_step", 1)
        sparse = config.get("moe_layers") or range(step - 1, len(layers), step)
        dense = config | {"intermediate_size": config.get("intermediate_size_mlp", 16384)}
        return experts.with_dense_layers(dense, replace(arch, layers=layers), lambda i: i not in sparse)


def _check_length(config: Config) -> None:
    """Raise Unsupported where a position has keys in another chunk, or its scores another scale."""
    longest = size_of(config, "attention_chunk_size", 8192)
    if config.get("attn_temperature_tuning", True):
        longest = min(longest, size_of(config, "floor_scale", 8192) - 1)
    if (config.get("max_model_len") or 0) > longest:
        raise Unsupported(
            f"Llama 4 attends in chunks of {longest} tokens or so, and octavo to one chunk only: set "
            f"max_model_len to {longest} or less."
        )
