"""Gemma 3 (text only) has local and global layers, each kind with its rope, and norms as in Gemma 2."""

from octavo.runtime.models.arch import SANDWICH_NORMS, Arch, Config, read_dense, read_heads
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.gemma import Gemma2, layer_types, plus_one, read_gemma
from octavo.runtime.models.weights import to

_DEFAULTS: Config = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131_072,
}
"""What transformers assumes where a config is silent, as those of Gemma 3's larger sizes are."""


class Gemma3(Decoder):
    """By default every sixth layer sees everything; the others see a window."""

    WEIGHTS = Gemma2.WEIGHTS.replace(
        {
            "layers.*.self_attn.q_norm": to("layers.*.attention.q_norm", "", plus_one),
            "layers.*.self_attn.k_norm": to("layers.*.attention.k_norm", "", plus_one),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Fill in the defaults, then spell the two ropes as transformers 5 does."""
        config = _DEFAULTS | config
        config.setdefault("layer_types", layer_types(config, config.get("sliding_window_pattern", 6)))
        if not config.get("rope_parameters"):
            config["rope_parameters"] = {
                "sliding_attention": {"rope_theta": config.get("rope_local_base_freq", 10_000.0)},
                "full_attention": {"rope_theta": config.get("rope_theta", 1_000_000.0)}
                | (config.pop("rope_scaling", None) or {}),
            }
        return read_gemma(
            config,
            norms=SANDWICH_NORMS,
            attention=read_heads(config, qk_norm="head", scale=config["query_pre_attn_scalar"] ** -0.5),
            feed_forward=read_dense(
                config, activation=config.get("hidden_activation") or "gelu_pytorch_tanh"
            ),
            logit_soft_cap=config.get("final_logit_softcapping") or 0.0,
        )
