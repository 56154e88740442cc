"""EXAONE 4 has norms behind attention and MLP; where layers have windows, those without do not rotate."""

from dataclasses import replace

from octavo.runtime.models.arch import RESIDUAL_NORMS, Arch, Config, read_arch, read_heads, size_of
from octavo.runtime.models.olmo import Olmo2


class Exaone4(Olmo2):
    """Three layers of four have a sliding window, if any has; heads of queries and keys are normalised."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read which layers have windows: `layer_types`, a pattern ("LLLG", none at the end), its length."""
        config = dict(config, rms_norm_eps=config.get("rms_norm_eps", 1e-5))
        pattern = config.get("sliding_window_pattern")
        if config.get("sliding_window") and not config.get("layer_types"):
            kinds = pattern if isinstance(pattern, str) else "L" * ((pattern or 4) - 1) + "G"
            local = [kinds[i % len(kinds)] == "L" for i in range(size_of(config, "num_hidden_layers"))]
            local[-1] &= not isinstance(pattern, str)
            config["layer_types"] = ["sliding_attention" if x else "full_attention" for x in local]
        arch = read_arch(config, norms=RESIDUAL_NORMS, attention=read_heads(config, qk_norm="head"))
        if not config.get("sliding_window"):
            return arch
        layers = (layer if layer.sliding_window else replace(layer, rope=None) for layer in arch.layers)
        return replace(arch, layers=tuple(layers))
