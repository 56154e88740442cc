"""Phi 1 to 2 have attention beside the MLP and biases; Phi 3 and 4 are Llamas with fused projections."""

from octavo.runtime.models.arch import Arch, Config, read_arch, read_dense, read_heads, read_norm
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to

_PHI_DEFAULTS: Config = {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new"}
_PHI3_DEFAULTS: Config = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
"""What transformers assumes where a config is silent."""


class Phi(Decoder):
    """Phi feeds attention and MLP by one norm, rotates a part of each head, and biases the head."""

    WEIGHTS = Decoder.WEIGHTS.replace(
        {
            "final_layernorm": to("norm"),
            "layers.*.self_attn.q_layernorm": to("layers.*.attention.q_norm"),
            "layers.*.self_attn.k_layernorm": to("layers.*.attention.k_norm"),
            "layers.*.self_attn.dense": to("layers.*.attention.out"),
            "layers.*.mlp.fc1": to("layers.*.mlp.up"),
            "layers.*.mlp.fc2": to("layers.*.mlp.down"),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Rotate half of a head unless the config says otherwise."""
        config = _PHI_DEFAULTS | config
        return read_arch(
            config,
            residual="parallel",
            norms=frozenset({"attention_in"}),
            norm=read_norm(config),
            attention=read_heads(
                config, qk_norm="head" if config.get("qk_layernorm") else "none", qkv_bias=True, out_bias=True
            ),
            feed_forward=read_dense(config, gated=False, bias=True),
            head_bias=True,
        )


class Phi3(Decoder):
    """Phi 3 stores queries, keys and values as one matrix, and so the two inputs of the MLP."""

    WEIGHTS = Decoder.WEIGHTS.replace(
        {
            "layers.*.self_attn.qkv_proj": to("layers.*.attention.qkv"),
            "layers.*.mlp.gate_up_proj": to("layers.*.mlp.up"),
        }
    )
    GGUF_WEIGHTS = Decoder.GGUF_WEIGHTS.replace({"blk.*.ffn_up": to("layers.*.mlp.up")})

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Take the older names of LongRoPE for it."""
        config = _PHI3_DEFAULTS | config
        for key in ("rope_scaling", "rope_parameters"):
            given: Config = config.get(key) or {}
            if (given.get("rope_type") or given.get("type")) in ("su", "yarn"):
                config[key] = {**given, "rope_type": "longrope"}
        return read_arch(config)
