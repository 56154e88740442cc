"""InternLM 2 and 3 are Llamas with names and biases of their own."""

from octavo.runtime.models.arch import Arch, Config, read_arch, read_dense, read_heads
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import WeightMap, to, ungroup_qkv

_DEFAULTS_3: Config = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}
"""What transformers assumes where a config is silent."""


class InternLM2(Decoder):
    """InternLM 2 stores the rows of a group's queries, then those of its key and of its value head."""

    WEIGHTS = WeightMap(
        {
            "tok_embeddings": to("embed_tokens"),
            "norm": to("norm"),
            "output": to("lm_head"),
            "layers.*.attention_norm": to("layers.*.attention_norm"),
            "layers.*.attention.wqkv": to("layers.*.attention.qkv", "", ungroup_qkv),
            "layers.*.attention.wo": to("layers.*.attention.out"),
            "layers.*.ffn_norm": to("layers.*.mlp_norm"),
            "layers.*.feed_forward.w1": to("layers.*.mlp.up", "gate"),
            "layers.*.feed_forward.w3": to("layers.*.mlp.up", "up"),
            "layers.*.feed_forward.w2": to("layers.*.mlp.down"),
        },
        prefix="model.",
        ignored=(r"rotary_emb\.inv_freq$",),
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Give biases to attention unless the config denies it; the MLP never has any."""
        bias = bool(config.get("bias", True))
        return read_arch(config, attention=read_heads(config, qkv_bias=bias, out_bias=bias))


class InternLM3(Decoder):
    """InternLM 3 has a switch for the biases of queries, keys and values, and one for the rest."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read the two switches, for which transformers writes other names."""
        bias = bool(config.get("bias", config.get("mlp_bias")))
        qkv_bias = bool(config.get("qkv_bias", config.get("attention_bias")))
        config = _DEFAULTS_3 | config
        return read_arch(
            config,
            attention=read_heads(config, qkv_bias=qkv_bias, out_bias=bias),
            feed_forward=read_dense(config, bias=bias),
        )
