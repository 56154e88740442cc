"""GLM-4 has norms before attention and MLP, 0414 also behind; GLM-4.5 and dots.1 have DeepSeek-V3's experts.

Half of each head rotates: of GLM-4's, neighbours.
"""

from dataclasses import replace

from octavo.runtime.models import experts
from octavo.runtime.models.arch import SANDWICH_NORMS, Arch, Config, read_arch, read_heads
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to


class GLM(Decoder):
    """Gates and values of the MLP are one matrix; queries, keys and values have biases."""

    WEIGHTS = Decoder.WEIGHTS.replace({"layers.*.mlp.gate_up_proj": to("layers.*.mlp.up")})

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        config = {
            "head_dim": 128,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-7,
        } | config
        return read_arch(config, attention=read_heads(config, out_bias=False), interleaved_rope=True)


class GLM4(GLM):
    """GLM 4 0414 has norms behind attention and MLP, too."""

    WEIGHTS = GLM.WEIGHTS.replace(
        {
            "layers.*.post_self_attn_layernorm": to("layers.*.attention_out_norm"),
            "layers.*.post_mlp_layernorm": to("layers.*.mlp_out_norm"),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        return replace(GLM.arch_from_hf(config), norms=SANDWICH_NORMS)


class GLM4MoE(Decoder):
    """Experts begin behind the first layers."""

    has_spare_layers = True
    WEIGHTS = Decoder.WEIGHTS.replace(
        experts.routed() | experts.shared("layers.*.mlp.shared_experts") | experts.DEEPSEEK
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Fill in the defaults; biases are on queries, keys and values only."""
        config = {"partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5} | config
        feed_forward = experts.read_experts(
            config, experts.deepseek_v3(config), shared=experts.read_shared(config), choice_bias=True
        )
        qk_norm = "head" if config.get("use_qk_norm") else "none"
        heads = read_heads(config, out_bias=False, qk_norm=qk_norm)
        return experts.with_first_dense(config, read_arch(config, attention=heads, feed_forward=feed_forward))
