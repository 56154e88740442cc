"""T5 reads a text and writes another; scores depend on learned terms of distances, not on positions.

Attention is not scaled, and each half has its own terms, which its layers share
(https://arxiv.org/abs/1910.10683). No kernel adds them: torch attends, and no step is recorded.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.base.errors import Unsupported
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.distance_bias import BUCKETS, DistanceBias
from octavo.runtime.layers.mlp import DenseArch
from octavo.runtime.layers.norm import NormArch, make_norm
from octavo.runtime.layers.self_attention import HeadsArch
from octavo.runtime.models import encoder_decoder
from octavo.runtime.models.arch import Arch, Config, LayerArch, expect, size_of
from octavo.runtime.models.decoder import DecoderLayer
from octavo.runtime.models.vision import full_batch
from octavo.runtime.models.weights import Target, WeightMap, qkv, to

_FEED_FORWARDS = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gated-gelu": ("gelu_new", True),
    "gated-silu": ("silu", True),
}
"""By feed_forward_proj: activation, and whether there is a gate."""


class T5Encoder(encoder_decoder.SourceEncoder):
    """Shares the decoder's token embedding."""

    look_up: Callable[[Tensor], Tensor]

    def __init__(self, arch: encoder_decoder.SourceArch, build: BuildContext) -> None:
        super().__init__()
        body = arch.encoder
        self.distances = DistanceBias(build.at("distances"), _num_heads(body))
        self.blocks = nn.ModuleList(
            DecoderLayer(body, build.at(f"blocks.{i}"), i, None) for i in range(len(body.layers))
        )
        self.norm = make_norm(body.norm, build.at("norm"), arch.hidden_size)

    def encode(self, items: Sequence[encoder_decoder.Features]) -> list[Tensor]:
        """See SourceEncoder. items: with `input_ids`, [S] int64"""
        texts = [item["input_ids"] for item in items]
        lengths = [len(text) for text in texts]
        batch = full_batch(lengths, texts[0].device)
        self.distances.add_to(batch)
        hidden = self.norm(encoder_decoder.run_encoder(self.blocks, self.look_up(torch.cat(texts)), batch))
        return list(torch.split(hidden, lengths))


class _Weights(WeightMap):
    """Tells the parts of a block apart, which checkpoints number."""

    def find(self, name: str) -> Target | None:
        return super().find(re.sub(r"\.layer\.(\d)\.", r".layer_\1.", name))


def _block_weights(side: str, ours: str, feed_forward: int) -> dict[str, Target]:
    """Return the names of a half's blocks. feed_forward: number of that part"""
    block = f"{side}.block.*."
    dense = f"{block}layer_{feed_forward}."
    return {
        **qkv(f"{block}layer_0.SelfAttention.?", f"{ours}attention.qkv"),
        f"{block}layer_0.SelfAttention.o": to(f"{ours}attention.out"),
        f"{block}layer_0.layer_norm": to(f"{ours}attention_norm"),
        f"{dense}DenseReluDense.wi": to(f"{ours}mlp.up"),
        f"{dense}DenseReluDense.wi_0": to(f"{ours}mlp.up", "gate"),
        f"{dense}DenseReluDense.wi_1": to(f"{ours}mlp.up", "up"),
        f"{dense}DenseReluDense.wo": to(f"{ours}mlp.down"),
        f"{dense}layer_norm": to(f"{ours}mlp_norm"),
    }


class T5(encoder_decoder.EncoderDecoder):
    """T5, its version 1.1, and FLAN-T5."""

    ENCODER = T5Encoder
    WEIGHTS = _Weights(
        {
            "shared": to("embed_tokens"),
            "lm_head": to("lm_head"),
            "encoder.final_layer_norm": to("encoder.norm"),
            "decoder.final_layer_norm": to("norm"),
            "encoder.block.*.layer_0.SelfAttention.relative_attention_bias": to("encoder.distances.table"),
            "decoder.block.*.layer_0.SelfAttention.relative_attention_bias": to("distances.table"),
            "decoder.block.*.layer_1.EncDecAttention.q": to("layers.*.cross_attention.q"),
            "decoder.block.*.layer_1.EncDecAttention.k": to("layers.*.cross_attention.kv", "k"),
            "decoder.block.*.layer_1.EncDecAttention.v": to("layers.*.cross_attention.kv", "v"),
            "decoder.block.*.layer_1.EncDecAttention.o": to("layers.*.cross_attention.out"),
            "decoder.block.*.layer_1.layer_norm": to("layers.*.cross_norm"),
            **_block_weights("encoder", "encoder.blocks.*.", 1),
            **_block_weights("decoder", "layers.*.", 2),
        },
        ignored=(r"^(encoder|decoder)\.embed_tokens\.", r"EncDecAttention\.relative_attention_bias"),
    )

    def __init__(self, arch: Arch, build: BuildContext) -> None:
        if build.kv_dtype == torch.int8:
            raise Unsupported("kv_cache_dtype int8: attention by distances takes floats.")
        super().__init__(arch, build)
        self.is_recordable = build.kernels.steps.record_calls is not None  # elsewhere torch attends
        assert isinstance(self.encoder, T5Encoder)
        self.distances = DistanceBias(build.at("distances"), _num_heads(arch))
        self.encoder.look_up = self.embed_tokens.forward

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        expect(config, relative_attention_num_buckets=BUCKETS, relative_attention_max_distance=128)
        num_layers = size_of(config, "num_layers", 6)
        is_tied = bool(config.get("tie_word_embeddings", True))
        scales = bool(config.get("scale_decoder_outputs", is_tied))
        return encoder_decoder.SourceArch(
            **_read_side(config, size_of(config, "num_decoder_layers", num_layers), is_causal=True),
            tied_head=is_tied,
            logit_scale=size_of(config, "d_model") ** -0.5 if scales else 1.0,
            encoder=Arch(**_read_side(config, num_layers, is_causal=False), final_norm=False),
            num_source_tokens=size_of(config, "n_positions", 512),
        )

    def embed(self, batch: ForwardBatch) -> Tensor:
        self.distances.add_causal(batch)
        return super().embed(batch)


def _num_heads(arch: Arch) -> int:
    heads = arch.layers[0].attention
    assert isinstance(heads, HeadsArch)
    return heads.num_heads


def _read_side(config: Config, num_layers: int, *, is_causal: bool) -> dict[str, Any]:
    name = config.get("feed_forward_proj", "relu")
    if name not in _FEED_FORWARDS:
        raise Unsupported(f"feed_forward_proj={name!r} is not supported: {', '.join(_FEED_FORWARDS)} are.")
    (activation, gated), num_heads = _FEED_FORWARDS[name], size_of(config, "num_heads")
    heads = HeadsArch(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=size_of(config, "d_kv"),
        scale=1.0,
        is_causal=is_causal,
    )
    dense = DenseArch(intermediate_size=size_of(config, "d_ff"), activation=activation, gated=gated)
    return {
        "vocab_size": size_of(config, "vocab_size"),
        "hidden_size": size_of(config, "d_model"),
        "layers": (LayerArch(attention=heads, feed_forward=dense),) * num_layers,
        "norm": NormArch(eps=config.get("layer_norm_epsilon") or 1e-6),
    }
