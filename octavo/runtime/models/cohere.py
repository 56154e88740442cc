"""Command R has attention beside the MLP, layer norms without biases, and rotates pairs of neighbours.

Command R7B and Command A (Cohere2) have windows; there, the layers that see everything do not rotate.
"""

from dataclasses import replace

from torch import Tensor

from octavo.runtime.layers.norm import NormArch
from octavo.runtime.models.arch import (
    Arch,
    Config,
    LayerArch,
    expect,
    factor_of,
    read_arch,
    read_heads,
    size_of,
)
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.gemma import layer_types
from octavo.runtime.models.weights import to

_DEFAULTS: Config = {"layer_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True}
_DEFAULTS_2: Config = _DEFAULTS | {"rope_theta": 10_000.0, "sliding_window": 4096}
"""What transformers assumes where a config is silent."""


def one_vector(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    """Return the norms of all heads, [heads, head_dim], as one vector."""
    return tensor.flatten()


def read_cohere(config: Config, *, head_norms: bool) -> Arch:
    """Read what both generations share. Raises Unsupported for variants that were never released."""
    expect(
        config,
        position_embedding_type="rope_gptj",
        rotary_pct=1.0,
        use_gated_activation=True,
        use_parallel_block=True,
    )
    return read_arch(
        config,
        interleaved_rope=True,
        residual="parallel",
        norms=frozenset({"attention_in"}),
        norm=NormArch(kind="layer", eps=config["layer_norm_eps"]),
        attention=read_heads(config, qk_norm="each_head" if head_norms else "none"),
        logit_scale=factor_of(config, "logit_scale", 0.0625),
    )


class Cohere(Decoder):
    """Command R+ has a norm for each head."""

    WEIGHTS = Decoder.WEIGHTS.replace(
        {
            "layers.*.self_attn.q_norm": to("layers.*.attention.q_norm", "", one_vector),
            "layers.*.self_attn.k_norm": to("layers.*.attention.k_norm", "", one_vector),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Tie embeddings and head unless the config says otherwise."""
        return read_cohere(_DEFAULTS | config, head_norms=bool(config.get("use_qk_norm")))


class Cohere2(Cohere):
    """Command R7B and Command A have windows; by default every fourth layer sees everything."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Fill in the pattern of layers; the local ones rotate."""
        expect(config, use_qk_norm=False, order_of_interleaved_layers="local_attn_first")
        config = _DEFAULTS_2 | config
        period = size_of(config, "sliding_window_pattern", 4)
        config["layer_types"] = config.get("layer_types") or layer_types(config, period)
        arch = read_cohere(config, head_norms=False)
        layers = tuple(x if x.sliding_window else replace(x, rope=None) for x in arch.layers)
        return replace(arch, layers=layers)
