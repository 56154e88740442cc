"""OLMo 2 and 3 have norms behind attention and MLP, and one for all heads of queries or keys.

OLMoE is a Llama with experts and such norms of queries and keys.
"""

from octavo.runtime.models import experts
from octavo.runtime.models.arch import RESIDUAL_NORMS, Arch, Config, expect, read_arch, read_heads, size_of
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
        config = {"rms_norm_eps": 1e-5} | config
        return read_arch(config, norms=RESIDUAL_NORMS, attention=read_heads(config, qk_norm="all_heads"))


class Olmo3(Olmo2):
    """Three layers of four have a sliding window; only the fourth's rope is stretched."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Fill in the defaults, and give each kind of layer its rope."""
        given: Config = {"sliding_window": 4096, "rope_theta": 500000.0} | config
        if not given.get("layer_types"):
            count = range(size_of(given, "num_hidden_layers"))
            given["layer_types"] = ["full_attention" if i % 4 == 3 else "sliding_attention" for i in count]
        if scaling := given.get("rope_scaling"):
            kinds = {"sliding_attention": {}, "full_attention": scaling}
            given |= {"rope_scaling": None, "rope_parameters": kinds}
        return Olmo2.arch_from_hf(given)


class OLMoE(Decoder):
    """Every token takes eight experts of 64."""

    WEIGHTS = Decoder.WEIGHTS.replace(experts.routed())

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Refuse clipped queries and keys, which no published model has."""
        expect(config, clip_qkv=None)
        feed_forward = experts.read_experts(
            config, experts.qwen(config), intermediate_size=size_of(config, "intermediate_size")
        )
        return read_arch(
            {"rms_norm_eps": 1e-5} | config,
            attention=read_heads(config, qk_norm="all_heads"),
            feed_forward=feed_forward,
        )
