"""ERNIE 4.5 is a Llama whose rope rotates neighbours."""

from octavo.runtime.models.arch import Arch, Config, read_arch, read_dense, read_heads
from octavo.runtime.models.decoder import Decoder


class Ernie45(Decoder):
    """One switch gives all projections biases."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        config = {"head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True} | config
        bias = bool(config.get("use_bias"))
        return read_arch(
            config,
            attention=read_heads(config, qkv_bias=bias, out_bias=bias),
            feed_forward=read_dense(config, bias=bias),
            interleaved_rope=True,
        )
