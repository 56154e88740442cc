"""StableLM 2 and 3B are Llamas with layer norms that rotate a part of each head."""

from octavo.runtime.models.arch import PRE_NORMS, Arch, Config, read_arch, read_heads, read_norm
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to


class StableLM(Decoder):
    """The 12B has attention beside the MLP, and a norm for each head."""

    WEIGHTS = Decoder.WEIGHTS.replace(
        {
            "layers.*.self_attn.q_layernorm.norms.*": to("layers.*.attention.q_norm", "*"),
            "layers.*.self_attn.k_layernorm.norms.*": to("layers.*.attention.k_norm", "*"),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Rotate a quarter of a head unless the config says otherwise."""
        config = {"partial_rotary_factor": 0.25} | config
        parallel = bool(config.get("use_parallel_residual"))
        return read_arch(
            config,
            residual="parallel" if parallel else "serial",
            norms=frozenset({"attention_in"}) if parallel else PRE_NORMS,
            norm=read_norm(config),
            attention=read_heads(
                config,
                qk_norm="each_head" if config.get("qk_layernorm") else "none",
                qkv_bias=bool(config.get("use_qkv_bias")),
            ),
        )
