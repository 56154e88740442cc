"""StarCoder 2 has layer norms, a plain MLP, biases everywhere, and a sliding window in all layers."""

from octavo.runtime.models.arch import Arch, Config, expect, read_arch, read_dense, read_heads, read_norm
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to

_DEFAULTS: Config = {
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "use_bias": True,
    "tie_word_embeddings": True,
}
"""What transformers assumes where a config is silent."""


class Starcoder2(Decoder):
    """StarCoder 2 names its weights like a Llama, but for the MLP."""

    WEIGHTS = Decoder.WEIGHTS.replace(
        {"layers.*.mlp.c_fc": to("layers.*.mlp.up"), "layers.*.mlp.c_proj": to("layers.*.mlp.down")}
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read the config. Raises Unsupported for norms and MLPs that were announced but never released."""
        expect(config, norm_type="layer_norm", mlp_type="default")
        config = _DEFAULTS | config
        bias = bool(config["use_bias"])
        return read_arch(
            config,
            norm=read_norm(config),
            attention=read_heads(config, qkv_bias=bias, out_bias=bias),
            feed_forward=read_dense(config, gated=False, bias=bias),
        )
