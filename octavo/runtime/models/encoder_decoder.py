"""An `EncoderDecoder` is a Decoder whose layers also read what an encoder made of the request's source.

The worker's SourcePart has the encoder read a source when its request starts, and the layers keep their keys
and values of it. Our parameter names beside the decoder's:

    layers.*.cross_norm  .cross_attention.{q, kv, out}
    encoder.blocks.*, named as the decoder's layers  encoder.norm  encoder.<what is before the blocks>
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo.base.errors import Unsupported
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.cross_attention import CrossAttention
from octavo.runtime.layers.norm import Term, make_norm
from octavo.runtime.layers.rotary import RotaryEmbedding
from octavo.runtime.layers.self_attention import HeadsArch
from octavo.runtime.models.arch import Arch, Config, arch_fields, read_dense, read_heads, read_norm, size_of
from octavo.runtime.models.decoder import ALL, Decoder, DecoderLayer, Stream, Want
from octavo.runtime.models.media import ItemEncoder
from octavo.runtime.models.weights import Target, qkv, to

Features = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class SourceArch(Arch):
    """A SourceArch describes an encoder-decoder. encoder: its other half; num_source_tokens: at most"""

    encoder: Arch
    num_source_tokens: int


class SourceEncoder(ItemEncoder):
    """Turns sources into what the decoder reads: their hidden states, [S, hidden_size]."""


class CrossLayer(DecoderLayer):
    """Reads the source between attention and MLP."""

    def __init__(
        self, arch: Arch, build: BuildContext, layer_id: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__(arch, build, layer_id, rotary)
        heads = arch.layers[layer_id].attention
        assert isinstance(arch, SourceArch) and isinstance(heads, HeadsArch)
        size, cache_id = arch.hidden_size, len(arch.layers) + layer_id
        self.cross_norm = make_norm(arch.norm, build.at("cross_norm"), size)
        self.cross_attention = CrossAttention(
            heads, build.at("cross_attention"), cache_id, size, arch.num_source_tokens
        )

    def forward(self, x: Term, residual: Tensor | None, batch: ForwardBatch, want: Want = ALL) -> Stream:
        x, residual = self._begin(x, residual, want)
        x, residual = self.cross_norm.add(self.attention(x, batch, want.rows), residual)
        x, residual = self.mlp_norm.add(self.cross_attention(x, batch, want.rows), residual)
        return self.mlp(x), residual


class NormalisedCrossLayer(CrossLayer):
    """Normalises the sums: the norms' outputs are the residual stream."""

    def forward(self, x: Term, residual: Tensor | None, batch: ForwardBatch, want: Want = ALL) -> Stream:
        """See DecoderLayer; `residual` stays None."""
        assert residual is None and isinstance(x, Tensor)
        x = self.attention_norm(self._gather(x, want.rows) + self.attention(x, batch, want.rows))
        x = self.cross_norm(x + self.cross_attention(x, batch, want.rows))
        return self.mlp_norm(x + self.mlp(x)), None


class EncoderDecoder(Decoder):
    """Takes a SourceArch. ENCODER: what makes its encoder"""

    LAYERS: ClassVar[Mapping[str, type[DecoderLayer]]] = {
        "serial": CrossLayer,
        "normalised": NormalisedCrossLayer,
    }
    ENCODER: ClassVar[type[SourceEncoder]]

    def __init__(self, arch: Arch, build: BuildContext) -> None:
        if build.parallel.pp.size > 1:
            raise Unsupported("pipeline_parallel_size > 1: encoder-decoders run in one stage.")
        super().__init__(arch, build)
        assert isinstance(arch, SourceArch)
        self.encoder = type(self).ENCODER(arch, build.at("encoder"))


def read_side(config: Config, side: str, **own: Any) -> dict[str, Any]:
    """Return the fields of the encoder's or the decoder's Arch, as BART's config and those like it have them.

    side: "encoder" or "decoder"; own: fields that the family adds or replaces. Raises BadCheckpoint.
    """
    size = size_of(config, "d_model")
    config = config | {
        "hidden_size": size,
        "num_hidden_layers": config.get(f"{side}_layers"),
        "num_attention_heads": config.get(f"{side}_attention_heads"),
        "intermediate_size": config.get(f"{side}_ffn_dim"),
        "head_dim": None,
        "num_key_value_heads": None,
    }
    common: dict[str, Any] = {
        "attention": read_heads(config, qkv_bias=True, out_bias=True, is_causal=side == "decoder"),
        "feed_forward": read_dense(config, gated=False, bias=True),
        "rope": None,
        "tied_head": bool(config.get("tie_word_embeddings", True)),
        "norm": read_norm(config),
        "embedding_scale": size**0.5 if config.get("scale_embedding") else 1.0,
    }
    return arch_fields(config, **common | own)


def side_weights(side: str) -> dict[str, Target]:
    """Return the names of layers in BART's checkpoints and those like it. side: as in read_side"""
    ours = "encoder.blocks.*." if side == "encoder" else "layers.*."
    theirs = f"{side}.layers.*."
    return {
        **qkv(f"{theirs}self_attn.?_proj", f"{ours}attention.qkv"),
        f"{theirs}self_attn.out_proj": to(f"{ours}attention.out"),
        f"{theirs}self_attn_layer_norm": to(f"{ours}attention_norm"),
        f"{theirs}encoder_attn.q_proj": to(f"{ours}cross_attention.q"),
        f"{theirs}encoder_attn.k_proj": to(f"{ours}cross_attention.kv", "k"),
        f"{theirs}encoder_attn.v_proj": to(f"{ours}cross_attention.kv", "v"),
        f"{theirs}encoder_attn.out_proj": to(f"{ours}cross_attention.out"),
        f"{theirs}encoder_attn_layer_norm": to(f"{ours}cross_norm"),
        f"{theirs}fc1": to(f"{ours}mlp.up"),
        f"{theirs}fc2": to(f"{ours}mlp.down"),
        f"{theirs}final_layer_norm": to(f"{ours}mlp_norm"),
    }


def run_encoder(blocks: nn.ModuleList, x: Tensor, batch: ForwardBatch) -> Tensor:
    """Return the residual stream behind the layers of an encoder, [T, size]."""
    term: Term = x
    residual: Tensor | None = None
    for block in blocks:
        term, residual = block(term, residual, batch)
    assert isinstance(term, torch.Tensor)
    return term if residual is None else residual + term
