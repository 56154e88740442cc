"""Nemotron and Arcee have a plain MLP with the square of a ReLU; Nemotron has layer norms around 1."""

from octavo.runtime.layers.norm import NormArch
from octavo.runtime.models.arch import Arch, Config, factor_of, read_arch, read_dense
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.gemma import plus_one
from octavo.runtime.models.weights import to


class Arcee(Decoder):
    """Arcee is a Llama otherwise."""

    WEIGHTS = Decoder.WEIGHTS.replace({"layers.*.mlp.up_proj": to("layers.*.mlp.up")})

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        config = {"hidden_act": "relu2", "rms_norm_eps": 1e-5} | config
        return read_arch(config, feed_forward=read_dense(config, gated=False))


class Nemotron(Arcee):
    """Half of each head rotates. Norms are stored less 1."""

    WEIGHTS = Arcee.WEIGHTS.replace(
        {
            "norm.weight": to("norm.weight", "", plus_one),
            "layers.*.input_layernorm.weight": to("layers.*.attention_norm.weight", "", plus_one),
            "layers.*.post_attention_layernorm.weight": to("layers.*.mlp_norm.weight", "", plus_one),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        config = {"partial_rotary_factor": 0.5, "hidden_act": "relu2"} | config
        norm = NormArch(kind="layer", bias=True, eps=factor_of(config, "norm_eps", 1e-5))
        return read_arch(config, feed_forward=read_dense(config, gated=False), norm=norm)
