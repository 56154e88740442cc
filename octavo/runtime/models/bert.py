"""BERT normalises each sum of the residual stream, and learns positions and types of tokens.

RoBERTa and XLM-R number positions from behind the padding token's id.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from octavo.config.checkpoint import offset_from_padding
from octavo.runtime.layers.pooler import ClassifierArch
from octavo.runtime.models.arch import (
    Arch,
    Config,
    arch_fields,
    expect,
    read_dense,
    read_heads,
    read_norm,
    size_of,
)
from octavo.runtime.models.encoder import Encoder, EncoderArch
from octavo.runtime.models.weights import Target, WeightMap, qkv, to


class Bert(Encoder):
    """BERT, and what is built like it."""

    WEIGHTS = WeightMap(
        {
            "embeddings.word_embeddings": to("embed_tokens"),
            "embeddings.position_embeddings": to("embed_positions"),
            "embeddings.token_type_embeddings": to("embed_types"),
            "embeddings.LayerNorm": to("embed_norm"),
            **qkv("encoder.layer.*.attention.self.?", "layers.*.attention.qkv", ("query", "key", "value")),
            "encoder.layer.*.attention.output.dense": to("layers.*.attention.out"),
            "encoder.layer.*.attention.output.LayerNorm": to("layers.*.attention_norm"),
            "encoder.layer.*.intermediate.dense": to("layers.*.mlp.up"),
            "encoder.layer.*.output.dense": to("layers.*.mlp.down"),
            "encoder.layer.*.output.LayerNorm": to("layers.*.mlp_norm"),
        },
        prefix="bert.",
        ignored=(
            *(r"position_ids$", r"^(bert\.)?pooler\.", r"^cls\.predictions\.(transform|bias)"),
            *(r"^cls\.predictions\.decoder\.", r"^cls\.seq_relationship\."),
        ),
    )
    GGUF_WEIGHTS = Encoder.GGUF_WEIGHTS.replace(
        {
            "token_embd_norm": to("embed_norm"),
            "token_types": to("embed_types"),
            "blk.*.attn_output_norm": to("layers.*.attention_norm"),
            "blk.*.layer_output_norm": to("layers.*.mlp_norm"),
        }
    )
    CLASSIFIER = ClassifierArch(dense="pooler.dense", out="classifier", out_bias=True)
    MASKED_HEAD: ClassVar[Mapping[str, Target]] = {
        "cls.predictions.transform.dense": to("head_dense"),
        "cls.predictions.transform.LayerNorm": to("head_norm"),
        "cls.predictions.bias": to("lm_head.bias"),
    }

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        expect(config, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
        own = arch_fields(
            config,
            attention=read_heads(config, qkv_bias=True, out_bias=True),
            feed_forward=read_dense(config, gated=False, bias=True),
            rope=None,
            num_learned_positions=size_of(config, "max_position_embeddings"),
            residual="normalised",
            final_norm=False,
            norm=read_norm({"layer_norm_eps": 1e-12} | config),
            tied_head=True,
        )
        return EncoderArch(**own, num_token_types=size_of(config, "type_vocab_size", 2))


class Roberta(Bert):
    """RoBERTa, XLM-R, CamemBERT."""

    WEIGHTS = replace(
        Bert.WEIGHTS,
        prefix="roberta.",
        ignored=(
            *(r"position_ids$", r"^(roberta\.)?pooler\.", r"^lm_head\.(dense|layer_norm|bias)"),
            r"^lm_head\.decoder\.",
        ),
    )
    MASKED_HEAD: ClassVar[Mapping[str, Target]] = {
        "lm_head.dense": to("head_dense"),
        "lm_head.layer_norm": to("head_norm"),
        "lm_head.bias": to("lm_head.bias"),
    }
    CLASSIFIER = ClassifierArch(
        dense="classifier.dense", out="classifier.out_proj", out_bias=True, token_out="classifier"
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        arch = Bert.arch_from_hf({"layer_norm_eps": 1e-5, "type_vocab_size": 1} | config)
        assert isinstance(arch, EncoderArch)
        return replace(arch, position_offset=offset_from_padding(config))


class DistilBert(Bert):
    """BERT with other names, and without types of tokens."""

    WEIGHTS = WeightMap(
        {
            "embeddings.word_embeddings": to("embed_tokens"),
            "embeddings.position_embeddings": to("embed_positions"),
            "embeddings.LayerNorm": to("embed_norm"),
            **qkv("transformer.layer.*.attention.?_lin", "layers.*.attention.qkv"),
            "transformer.layer.*.attention.out_lin": to("layers.*.attention.out"),
            "transformer.layer.*.sa_layer_norm": to("layers.*.attention_norm"),
            "transformer.layer.*.ffn.lin1": to("layers.*.mlp.up"),
            "transformer.layer.*.ffn.lin2": to("layers.*.mlp.down"),
            "transformer.layer.*.output_layer_norm": to("layers.*.mlp_norm"),
        },
        prefix="distilbert.",
        ignored=(
            *(r"position_ids$", r"^vocab_(transform|layer_norm)", r"^vocab_projector\.bias"),
            r"^vocab_projector\.weight",
        ),
    )
    CLASSIFIER = ClassifierArch(dense="pre_classifier", activation="ReLU", out="classifier", out_bias=True)
    MASKED_HEAD: ClassVar[Mapping[str, Target]] = {
        "vocab_transform": to("head_dense"),
        "vocab_layer_norm": to("head_norm"),
        "vocab_projector.bias": to("lm_head.bias"),
    }
    OWN_NAMES: ClassVar[dict[str, str]] = {
        "dim": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "hidden_dim": "intermediate_size",
    }

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        renamed = {ours: config[own] for own, ours in DistilBert.OWN_NAMES.items() if own in config}
        arch = Bert.arch_from_hf({"hidden_act": config.get("activation") or "gelu"} | config | renamed)
        assert isinstance(arch, EncoderArch)
        return replace(arch, num_token_types=0)
