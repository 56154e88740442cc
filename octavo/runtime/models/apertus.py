"""Apertus has norms on the heads of queries and keys, and a plain MLP with xIELU, which learns its slopes."""

from torch import Tensor

from octavo.runtime.models.arch import Arch, Config, LayerArch, read_arch, read_dense, read_heads
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to

_ROPE: Config = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _flat(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    return tensor.reshape(1)


class Apertus(Decoder):
    """Its norms have names of their own."""

    WEIGHTS = Decoder.WEIGHTS.replace(
        {
            "layers.*.attention_layernorm": to("layers.*.attention_norm"),
            "layers.*.feedforward_layernorm": to("layers.*.mlp_norm"),
            "layers.*.mlp.up_proj": to("layers.*.mlp.up"),
        }
        | {
            f"layers.*.mlp.act_fn.{name}": to(f"layers.*.mlp.slopes.{name}", "", _flat)
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        config = {"rms_norm_eps": 1e-5, "hidden_act": "xielu"} | config
        if not config.get("rope_parameters") and not config.get("rope_scaling"):
            config["rope_parameters"] = _ROPE
        heads, dense = read_heads(config, qk_norm="head"), read_dense(config, gated=False)
        return read_arch(config, attention=heads, feed_forward=dense)
