"""OLMo 2: norms behind attention and MLP, not before them; one norm for all heads of queries, one of keys."""

from typing import ClassVar

from octavo.runtime.models.arch import RESIDUAL_NORMS, Arch, Config, read_arch, read_heads
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.llama import LLAMA_WEIGHTS, Llama
from octavo.runtime.models.weights import to


class Olmo2(Decoder):
    """A Llama otherwise."""

    WEIGHTS = LLAMA_WEIGHTS.replace(
        {
            "layers.*.post_attention_layernorm": to("layers.*.attention_out_norm"),
            "layers.*.post_feedforward_layernorm": to("layers.*.mlp_out_norm"),
        }
    )
    TINY: ClassVar[Config] = Llama.TINY | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Biases are optional."""
        bias = bool(config.get("attention_bias"))
        config = {"rms_norm_eps": 1e-5} | config
        attention = read_heads(config, qk_norm="all_heads", qkv_bias=bias, out_bias=bias)
        return read_arch(config, norms=RESIDUAL_NORMS, attention=attention)
