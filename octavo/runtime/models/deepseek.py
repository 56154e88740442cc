"""DeepSeek V2 (full and Lite) and V3 (R1, Kimi-K2) have latent attention, and experts behind dense layers."""

import math
from typing import Any

from octavo.runtime.layers.experts import Router
from octavo.runtime.layers.latent_attention import LatentArch
from octavo.runtime.layers.rotary import YarnRope
from octavo.runtime.models import experts
from octavo.runtime.models.arch import Arch, Config, read_arch, read_rope, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to


class DeepseekV2(Decoder):
    """Experts are chosen by softmax."""

    has_spare_layers = True
    WEIGHTS = Decoder.WEIGHTS.replace(
        experts.routed()
        | experts.shared("layers.*.mlp.shared_experts")
        | experts.DEEPSEEK
        | {
            "layers.*.self_attn.q_proj": to("layers.*.attention.q"),
            "layers.*.self_attn.q_a_proj": to("layers.*.attention.q_a"),
            "layers.*.self_attn.q_a_layernorm": to("layers.*.attention.q_norm"),
            "layers.*.self_attn.q_b_proj": to("layers.*.attention.q"),
            "layers.*.self_attn.kv_a_proj_with_mqa": to("layers.*.attention.kv_a"),
            "layers.*.self_attn.kv_a_layernorm": to("layers.*.attention.kv_norm"),
            "layers.*.self_attn.kv_b_proj": to("layers.*.attention.heads"),
        }
    )

    GGUF_WEIGHTS = Decoder.GGUF_WEIGHTS.replace(
        {
            "blk.*.attn_q": to("layers.*.attention.q"),
            "blk.*.attn_q_a": to("layers.*.attention.q_a"),
            "blk.*.attn_q_a_norm": to("layers.*.attention.q_norm"),
            "blk.*.attn_q_b": to("layers.*.attention.q"),
            "blk.*.attn_kv_a_mqa": to("layers.*.attention.kv_a"),
            "blk.*.attn_kv_a_norm": to("layers.*.attention.kv_norm"),
            "blk.*.attn_k_b": to("layers.*.attention.heads"),  # with attn_v_b, as the reader joins them
            "blk.*.attn_v_b": to("layers.*.attention.heads"),
            "blk.*.attn_kv_b": to("layers.*.attention.heads"),
            "blk.*.exp_probs_b": to("layers.*.mlp.choice"),
            "blk.*.ffn_gate_shexp": to("layers.*.mlp.shared.up", "gate"),
            "blk.*.ffn_up_shexp": to("layers.*.mlp.shared.up", "up"),
            "blk.*.ffn_down_shexp": to("layers.*.mlp.shared.down"),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        return _read({"first_k_dense_replace": 0} | config, experts.deepseek_v2(config))


class DeepseekV3(DeepseekV2):
    """Experts are chosen by sigmoid, and a bias that balances them."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        config = {
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
        } | config
        return _read(config, experts.deepseek_v3(config), choice_bias=True)


def _read(config: Config, router: Router, **own: Any) -> Arch:
    feed_forward = experts.read_experts(config, router, shared=experts.read_shared(config), **own)
    rope_size = size_of(config, "qk_rope_head_dim")
    rope = read_rope(config, rope_size, interleaved=bool(config.get("rope_interleave", True)))
    plain_size = size_of(config, "qk_nope_head_dim")
    heads = LatentArch(
        num_heads=size_of(config, "num_attention_heads"),
        latent_size=size_of(config, "kv_lora_rank"),
        rope_size=rope_size,
        plain_size=plain_size,
        value_size=size_of(config, "v_head_dim"),
        scale=(plain_size + rope_size) ** -0.5 * _scores_factor(rope),
        query_rank=size_of(config, "q_lora_rank") if config.get("q_lora_rank") else 0,
        bias=bool(config.get("attention_bias")),
    )
    arch = read_arch(config, attention=heads, feed_forward=feed_forward, rope=rope)
    return experts.with_first_dense(config, arch)


def _scores_factor(rope: Any) -> float:
    """Return the second correction of YaRN, that of all components; the tables of the rope have the first."""
    if not isinstance(rope, YarnRope) or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
