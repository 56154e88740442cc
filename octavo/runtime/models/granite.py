"""Granite 3 is a Llama with constant factors on embeddings, attention scores, residuals and logits."""

from torch import Tensor

from octavo.runtime.batch import ForwardBatch
from octavo.runtime.models.arch import Arch, Config, factor_of, read_arch, read_heads
from octavo.runtime.models.decoder import Decoder


class Granite(Decoder):
    """Granite multiplies given embeddings, too: they stand for what the table holds."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read the factors: each is 1 unless the config says otherwise, that on the scores as well."""
        return read_arch(
            config,
            attention=read_heads(config, scale=factor_of(config, "attention_multiplier")),
            embedding_scale=factor_of(config, "embedding_multiplier"),
            residual_scale=factor_of(config, "residual_multiplier"),
            logit_scale=1 / factor_of(config, "logits_scaling"),
        )

    def embed(self, batch: ForwardBatch) -> Tensor:
        """See Decoder.embed."""
        return batch.with_given_embeds(self.embed_tokens(batch.input_ids)) * self._embedding_scale
