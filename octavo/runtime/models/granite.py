"""Granite 3: a Llama with constant factors on embeddings, attention scores, residuals and logits."""

from typing import ClassVar

from torch import Tensor

from octavo.runtime.batch import ForwardBatch
from octavo.runtime.models.arch import Arch, Config, factor_of, read_arch, read_dense, read_heads
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.llama import LLAMA_WEIGHTS, Llama


class Granite(Decoder):
    """Given embeddings, too, are multiplied: they stand for what the table holds."""

    WEIGHTS = LLAMA_WEIGHTS
    TINY: ClassVar[Config] = Llama.TINY | {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    }

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Each factor is 1 unless the config says otherwise, that on the scores as well."""
        bias = bool(config.get("attention_bias"))
        return read_arch(
            config,
            attention=read_heads(
                config, qkv_bias=bias, out_bias=bias, scale=factor_of(config, "attention_multiplier")
            ),
            feed_forward=read_dense(config, bias=bool(config.get("mlp_bias"))),
            embedding_scale=factor_of(config, "embedding_multiplier"),
            residual_scale=factor_of(config, "residual_multiplier"),
            logit_scale=1 / factor_of(config, "logits_scaling"),
        )

    def embed(self, batch: ForwardBatch) -> Tensor:
        """See Decoder.embed."""
        return batch.with_given_embeds(self.embed_tokens(batch.input_ids)) * self._embedding_scale
