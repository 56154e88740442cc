"""Qwen 2 and 2.5 have biases on q, k, v; Qwen 3 has norms on the heads of q and k."""

from octavo.runtime.models.arch import Arch, Config, read_arch, read_heads
from octavo.runtime.models.decoder import Decoder


def _windowed(config: Config) -> Config:
    """Return the config with a window only on layers that have one: those from `max_window_layers` on."""
    if not config.get("use_sliding_window"):
        return {**config, "sliding_window": None, "layer_types": None}
    if config.get("layer_types"):
        return config
    first, count = config.get("max_window_layers", 28), int(config["num_hidden_layers"])
    kinds = ["full_attention" if i < first else "sliding_attention" for i in range(count)]
    return {**config, "layer_types": kinds}


class Qwen2(Decoder):
    """Qwen 2 is a Llama with biases on queries, keys and values."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Add the biases, which are not in the config."""
        config = _windowed(config)
        return read_arch(config, attention=read_heads(config, qkv_bias=True, out_bias=False))


class Qwen3(Decoder):
    """Qwen 3 is a Llama with normalised queries and keys, and heads of a size of their own."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Give a head 128 components unless the config says otherwise."""
        config = {"head_dim": 128} | _windowed(config)
        return read_arch(config, attention=read_heads(config, qk_norm="head"))
