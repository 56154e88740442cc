"""Nomic, GTE ("NewModel") and Jina v3 encoders: BERT whose heads rotate instead of learning positions.

The names of three checkpoint layouts and of transformers lead to the same parameters.
"""

from dataclasses import replace
from typing import ClassVar

from octavo.runtime.layers.pooler import ClassifierArch
from octavo.runtime.models import arch
from octavo.runtime.models.encoder import Encoder, EncoderArch
from octavo.runtime.models.weights import WeightMap, qkv, swap_halves, to

_ATTENTION = {
    **qkv("self_attn.?_proj", "attention.qkv"),
    "self_attn.o_proj": to("attention.out"),
    "attn.Wqkv": to("attention.qkv"),
    "attn.out_proj": to("attention.out"),
    "mixer.Wqkv": to("attention.qkv"),
    "mixer.out_proj": to("attention.out"),
    "attention.qkv_proj": to("attention.qkv"),
    "attention.o_proj": to("attention.out"),
    "post_attention_layernorm": to("attention_norm"),
    "norm1": to("attention_norm"),
    "attn_ln": to("attention_norm"),
}
_FEED_FORWARD = {
    "mlp.gate_proj": to("mlp.up", "gate"),
    "mlp.up_proj": to("mlp.up", "up"),
    "mlp.down_proj": to("mlp.down"),
    "mlp.fc12": to("mlp.up", "gate"),
    "mlp.fc11": to("mlp.up", "up"),
    "mlp.fc1": to("mlp.up"),
    "mlp.fc2": to("mlp.down"),
    "mlp.up_gate_proj": to("mlp.up", "", swap_halves),
    "post_mlp_layernorm": to("mlp_norm"),
    "norm2": to("mlp_norm"),
    "mlp_ln": to("mlp_norm"),
}


def _weights(prefix: str) -> WeightMap:
    names = {
        "embeddings.word_embeddings": to("embed_tokens"),
        "embeddings.token_type_embeddings": to("embed_types"),
        "embeddings.LayerNorm": to("embed_norm"),
        "emb_ln": to("embed_norm"),
    }
    for stem in ("layers.*.", "encoder.layers.*.", "encoder.layer.*."):
        for name, target in (_ATTENTION | _FEED_FORWARD).items():
            names[stem + name] = target._replace(module=f"layers.*.{target.module}")
    ignored = (r"position_ids$", r"inv_freq$", rf"^({prefix})?pooler\.", r"^cls\.", r"^lm_head\.")
    return WeightMap(names, prefix, ignored)


class NomicBert(Encoder):
    """Nomic's has a SiLU gate and no biases; its own configs spell sizes as GPT-2's do."""

    WEIGHTS = _weights("nomic_bert.")
    CLASSIFIER = ClassifierArch(dense="pooler.dense", out="classifier", out_bias=True)
    OWN_NAMES: ClassVar[dict[str, str]] = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_inner": "intermediate_size",
        "rotary_emb_base": "rope_theta",
        "layer_norm_epsilon": "layer_norm_eps",
    }

    @staticmethod
    def arch_from_hf(config: arch.Config) -> arch.Arch:
        arch.expect(config, prenorm=False, rotary_emb_fraction=1.0, rotary_emb_interleaved=False)
        arch.expect(config, moe_every_n_layers=0, activation_function="swiglu", qkv_proj_bias=False)
        config = {"rope_theta": 1000.0, "hidden_act": "silu", "type_vocab_size": 2} | config
        config |= {ours: config[own] for own, ours in NomicBert.OWN_NAMES.items() if own in config}
        return _arch({"layer_norm_eps": 1e-12, "activation_function": None} | config)


class GTE(Encoder):
    """GTE's new encoders, Snowflake's and others: a GELU gate, a bias behind it, NTK-stretched ropes."""

    WEIGHTS = _weights("new.|gte.")
    CLASSIFIER = NomicBert.CLASSIFIER

    @staticmethod
    def arch_from_hf(config: arch.Config) -> arch.Arch:
        arch.expect(config, position_embedding_type="rope", layer_norm_type="layer_norm", pack_qkv=True)
        arch.expect(config, logn_attention_scale=False)
        config = {"rope_theta": 160000.0, "layer_norm_eps": 1e-12, "type_vocab_size": 1} | config
        return _arch(config, qkv_bias=True, out_bias=True, down_bias=True)


class JinaV3(Encoder):
    """Jina's third encoder in transformers' form, without the adapters that its tasks have elsewhere."""

    WEIGHTS = _weights("roberta.")
    CLASSIFIER = replace(NomicBert.CLASSIFIER, dense="classifier.dense", out="classifier.out_proj")

    @staticmethod
    def arch_from_hf(config: arch.Config) -> arch.Arch:
        config = {"rope_theta": 20000.0, "layer_norm_eps": 1e-5, "type_vocab_size": 1} | config
        return _arch(config, qkv_bias=True, out_bias=True, gated=False, bias=True)


def _arch(
    config: arch.Config, *, gated: bool = True, bias: bool = False, down_bias: bool = False, **heads: bool
) -> arch.Arch:
    attention = arch.read_heads(config, **heads)
    own = arch.arch_fields(
        config,
        attention=attention,
        feed_forward=arch.read_dense(config, gated=gated, bias=bias, down_bias=down_bias),
        rope=arch.read_rope(config, attention.head_dim),
        residual="normalised",
        final_norm=False,
        norm=arch.read_norm(config),
        tied_head=True,
    )
    num_types = arch.size_of(config, "type_vocab_size") if config["type_vocab_size"] else 0
    return EncoderArch(**own, num_token_types=num_types)
