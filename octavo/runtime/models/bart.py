"""BART reads a text in both directions and writes another, such as its summary.

Both halves number positions from 2 and normalise embeddings and sums (https://arxiv.org/abs/1910.13461).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.embedding import Embedding
from octavo.runtime.layers.norm import make_norm
from octavo.runtime.models import encoder_decoder
from octavo.runtime.models.arch import Arch, Config, size_of
from octavo.runtime.models.decoder import LAYERS
from octavo.runtime.models.opt import without_padding
from octavo.runtime.models.vision import full_batch
from octavo.runtime.models.weights import WeightMap, to


class BartEncoder(encoder_decoder.SourceEncoder):
    """Shares the decoder's token embedding."""

    look_up: Callable[[Tensor, float], Tensor]

    def __init__(self, arch: encoder_decoder.SourceArch, build: BuildContext) -> None:
        super().__init__()
        body, size, rows = arch.encoder, arch.hidden_size, arch.num_source_tokens
        self._scale = body.embedding_scale
        self.embed_positions = Embedding(build.at("embed_positions"), rows, size)
        self.embed_norm = make_norm(body.norm, build.at("embed_norm"), size)
        layer = LAYERS[body.residual]
        self.blocks = nn.ModuleList(
            layer(body, build.at(f"blocks.{i}"), i, None) for i in range(len(body.layers))
        )

    def encode(self, items: Sequence[encoder_decoder.Features]) -> list[Tensor]:
        """See SourceEncoder. items: with `input_ids`, [S] int64"""
        texts = [item["input_ids"] for item in items]
        lengths = [len(text) for text in texts]
        batch = full_batch(lengths, texts[0].device)
        x = self.look_up(torch.cat(texts), self._scale) + self.embed_positions(batch.positions)
        return list(torch.split(encoder_decoder.run_encoder(self.blocks, self.embed_norm(x), batch), lengths))


class Bart(encoder_decoder.EncoderDecoder):
    """Takes a SourceArch whose layers are normalised."""

    ENCODER = BartEncoder
    WEIGHTS = WeightMap(
        {
            "shared": to("embed_tokens"),
            "encoder.embed_positions": to("encoder.embed_positions", "", without_padding),
            "encoder.layernorm_embedding": to("encoder.embed_norm"),
            "decoder.embed_positions": to("embed_positions", "", without_padding),
            "decoder.layernorm_embedding": to("embed_norm"),
            "lm_head": to("lm_head"),
            **encoder_decoder.side_weights("encoder"),
            **encoder_decoder.side_weights("decoder"),
        },
        prefix="model.",
        ignored=(r"^final_logits_bias$", r"^(model\.)?(encoder|decoder)\.embed_tokens\."),
    )

    def __init__(self, arch: Arch, build: BuildContext) -> None:
        super().__init__(arch, build)
        assert isinstance(self.encoder, BartEncoder)
        self.embed_norm = make_norm(arch.norm, build.at("embed_norm"), arch.hidden_size)
        self.encoder.look_up = self.embed_tokens.forward

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        config = {"activation_function": "gelu"} | config
        length = size_of(config, "max_position_embeddings", 1024)
        return encoder_decoder.SourceArch(
            **encoder_decoder.read_side(config, "decoder", residual="normalised", final_norm=False),
            encoder=Arch(
                **encoder_decoder.read_side(config, "encoder", residual="normalised", final_norm=False)
            ),
            num_source_tokens=length,
            num_learned_positions=length,
        )

    def embed(self, batch: ForwardBatch) -> Tensor:
        normed: Tensor = self.embed_norm(super().embed(batch))
        return normed
