"""Gemma scales embeddings and adds one to norms; Gemma 2 has soft caps and alternating windows, too.

Gemma 3 (text only) has local and global layers, each kind with its rope, and norms as in Gemma 2.
"""

from typing import Any

from torch import Tensor

from octavo.base.errors import Unsupported
from octavo.runtime.models.arch import (
    SANDWICH_NORMS,
    Arch,
    Config,
    LayerArch,
    read_arch,
    read_dense,
    read_heads,
    size_of,
)
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to

_ACTIVATION = "gelu_pytorch_tanh"
_DEFAULTS: Config = {"head_dim": 256, "tie_word_embeddings": True, "hidden_act": _ACTIVATION}
_DEFAULTS_2: Config = _DEFAULTS | {
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
"""What transformers assumes where a config is silent."""


def plus_one(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    """Return 1 + w, by which these norms multiply. (GGUF files hold the sum.)"""
    return tensor.float() + 1


def layer_types(config: Config, period: int) -> list[str]:
    """Return the kinds of layers: local, but every `period`-th one is global."""
    count = size_of(config, "num_hidden_layers")
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(count)]


def read_gemma(config: Config, **own: Any) -> Arch:
    """Read the fields that all generations share. Raises Unsupported for the variants that embed texts."""
    if config.get("use_bidirectional_attention"):
        raise Unsupported("use_bidirectional_attention: a Gemma that sees what comes later cannot generate")
    return read_arch(config, embedding_scale=size_of(config, "hidden_size") ** 0.5, **own)


def _read_sandwich(config: Config, **heads: Any) -> Arch:
    """Read a config of Gemma 2 or 3. heads: what is special about its attention"""
    return read_gemma(
        config,
        norms=SANDWICH_NORMS,
        attention=read_heads(config, scale=config["query_pre_attn_scalar"] ** -0.5, **heads),
        feed_forward=read_dense(config, activation=config.get("hidden_activation") or _ACTIVATION),
        logit_soft_cap=config.get("final_logit_softcapping") or 0.0,
    )


class Gemma(Decoder):
    """Gemma 1 is a Llama with large heads."""

    WEIGHTS = Decoder.WEIGHTS.replace(
        {
            "norm": to("norm", "", plus_one),
            "layers.*.input_layernorm": to("layers.*.attention_norm", "", plus_one),
            "layers.*.post_attention_layernorm": to("layers.*.mlp_norm", "", plus_one),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Take "gelu", as the first configs say, for the approximation that the model was trained with."""
        config = _DEFAULTS | config
        if config["hidden_act"] == "gelu":
            config["hidden_act"] = _ACTIVATION
        return read_gemma(config)


class Gemma2(Decoder):
    """Gemma 2 has norms around attention and MLP, caps on scores and logits, and alternating windows."""

    WEIGHTS = Gemma.WEIGHTS.replace(
        {
            "layers.*.post_attention_layernorm": to("layers.*.attention_out_norm", "", plus_one),
            "layers.*.pre_feedforward_layernorm": to("layers.*.mlp_norm", "", plus_one),
            "layers.*.post_feedforward_layernorm": to("layers.*.mlp_out_norm", "", plus_one),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Make the first layer local, the second global, and so on."""
        config = _DEFAULTS_2 | config
        config["layer_types"] = config.get("layer_types") or layer_types(config, 2)
        return _read_sandwich(config, soft_cap=config["attn_logit_softcapping"] or 0.0)


_DEFAULTS_3: Config = {
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
        config = _DEFAULTS_3 | config
        config.setdefault("layer_types", layer_types(config, config.get("sliding_window_pattern", 6)))
        if not config.get("rope_parameters"):
            config["rope_parameters"] = {
                "sliding_attention": {"rope_theta": config.get("rope_local_base_freq", 10_000.0)},
                "full_attention": {"rope_theta": config.get("rope_theta", 1_000_000.0)}
                | (config.pop("rope_scaling", None) or {}),
            }
        return _read_sandwich(config, qk_norm="head")
