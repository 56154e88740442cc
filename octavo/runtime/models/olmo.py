"""OLMo 2 has norms behind attention and MLP, and one for all heads of queries or keys."""

from octavo.runtime.models.arch import RESIDUAL_NORMS, Arch, Config, read_arch, read_heads
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to


class Olmo2(Decoder):
    """OLMo 2 is a Llama otherwise."""

    WEIGHTS = Decoder.WEIGHTS.replace(
        {
            "layers.*.post_attention_layernorm": to("layers.*.attention_out_norm"),
            "layers.*.post_feedforward_layernorm": to("layers.*.mlp_out_norm"),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Fill in the defaults."""
        config = {"rms_norm_eps": 1e-5} | config
        return read_arch(config, norms=RESIDUAL_NORMS, attention=read_heads(config, qk_norm="all_heads"))
