"""Seed-OSS is a Llama with biases on queries, keys and values, and heads of a size of their own."""

from octavo.runtime.models.arch import Arch, Config, read_arch, read_heads
from octavo.runtime.models.decoder import Decoder


class SeedOss(Decoder):
    """Biases of the attention's output have a switch of their own."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        config = {"head_dim": 128, "attention_bias": True} | config
        return read_arch(
            config, attention=read_heads(config, out_bias=bool(config.get("attention_out_bias")))
        )
