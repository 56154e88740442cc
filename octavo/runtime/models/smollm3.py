"""SmolLM 3 is a Llama some of whose layers do not rotate."""

from dataclasses import replace

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.runtime.models.arch import Arch, Config, read_arch, size_of
from octavo.runtime.models.decoder import Decoder

_DEFAULTS: Config = {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True}
"""What transformers assumes where a config is silent."""


class SmolLM3(Decoder):
    """By default every fourth layer does not rotate (NoPE, https://arxiv.org/abs/2501.18795)."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Give windows, if any, to the layers that do not rotate, unless the config says which."""
        config = _DEFAULTS | config
        rotated = rotated_layers(config)
        arch = read_arch(_windowed(config, rotated))
        pairs = zip(arch.layers, rotated, strict=True)
        return replace(arch, layers=tuple(layer if r else replace(layer, rope=None) for layer, r in pairs))


def rotated_layers(config: Config) -> list[bool]:
    """Return, for each layer, whether it rotates. (The config's `no_rope_layers` has a 1 where it does.)"""
    count = size_of(config, "num_hidden_layers")
    given = config.get("no_rope_layers")
    if given is None:
        interval = size_of(config, "no_rope_layer_interval", 4)
        return [(i + 1) % interval > 0 for i in range(count)]
    if not isinstance(given, list) or len(given) < count or not all(x in (0, 1) for x in given):
        raise BadCheckpoint(f"no_rope_layers must give 0 or 1 for each of {count} layers; found {given!r}")
    return [bool(x) for x in given[:count]]


def _windowed(config: Config, rotated: list[bool]) -> Config:
    if not config.get("use_sliding_window"):
        if "sliding_attention" in (config.get("layer_types") or ()):
            raise Unsupported("layer_types has sliding_attention, but use_sliding_window is off")
        return config | {"sliding_window": None}
    if not config.get("sliding_window") or config.get("layer_types"):
        return config
    return config | {"layer_types": ["full_attention" if r else "sliding_attention" for r in rotated]}
