"""LFM2 has short convolutions between gates in most layers, attention in the others; also with experts."""

from dataclasses import replace

from octavo.runtime.layers.experts import Router
from octavo.runtime.layers.norm import NormArch
from octavo.runtime.layers.recurrent import RecurrentArch
from octavo.runtime.models import experts
from octavo.runtime.models.arch import (
    Arch,
    Config,
    factor_of,
    read_arch,
    read_dense,
    read_heads,
    read_rope,
    size_of,
)
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.recurrent import conv_rows, with_recurrent_layers
from octavo.runtime.models.weights import to


class LFM2(Decoder):
    """Its tensors have names of their own."""

    WEIGHTS = Decoder.WEIGHTS.replace(
        {
            "embedding_norm": to("norm"),
            "layers.*.operator_norm": to("layers.*.attention_norm"),
            "layers.*.ffn_norm": to("layers.*.mlp_norm"),
            "layers.*.self_attn.out_proj": to("layers.*.attention.out"),
            "layers.*.self_attn.q_layernorm": to("layers.*.attention.q_norm"),
            "layers.*.self_attn.k_layernorm": to("layers.*.attention.k_norm"),
            "layers.*.conv.in_proj": to("layers.*.attention.project"),
            "layers.*.conv.conv.weight": to("layers.*.attention.conv", "", conv_rows),
            "layers.*.conv.conv.bias": to("layers.*.attention.conv_bias"),
            "layers.*.conv.out_proj": to("layers.*.attention.out"),
            "layers.*.feed_forward.w1": to("layers.*.mlp.up", "gate"),
            "layers.*.feed_forward.w3": to("layers.*.mlp.up", "up"),
            "layers.*.feed_forward.w2": to("layers.*.mlp.down"),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read which layers have attention, and the size of feed-forward blocks."""
        config = {"rope_theta": 1e6, "num_key_value_heads": 8, **config}
        if not config.get("layer_types"):
            count = size_of(config, "num_hidden_layers")
            full = config.get("full_attn_idxs") or range(count)
            config["layer_types"] = ["full_attention" if i in full else "conv" for i in range(count)]
        size, bias = size_of(config, "hidden_size"), bool(config.get("conv_bias"))
        heads = read_heads(config, qk_norm="head", qkv_bias=False, out_bias=False)
        arch = read_arch(
            config,
            attention=heads,
            feed_forward=read_dense(config, intermediate_size=_inner_size(config), activation="silu"),
            rope=read_rope(config, heads.head_dim),
            norm=NormArch(eps=config.get("norm_eps") or 1e-5),
            tied_head=bool(config.get("tie_embedding", config.get("tie_word_embeddings", True))),
        )
        taps, num_drafts = config.get("conv_L_cache", 3), config.get("num_drafts", 0)
        conv = RecurrentArch(taps=taps, size=size, bias=bias, conv_bias=bias, num_drafts=num_drafts)
        return with_recurrent_layers(config, arch, conv)


class LFM2MoE(LFM2):
    """Experts are chosen by sigmoid and a bias that balances them; the first layers are dense."""

    WEIGHTS = LFM2.WEIGHTS.replace(
        experts.routed("layers.*.feed_forward", "w1", "w3", "w2")
        | {"layers.*.feed_forward.expert_bias": to("layers.*.mlp.choice.bias")}
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Add the experts to the layers behind the dense ones."""
        config = {"block_auto_adjust_ff_dim": False} | config
        arch, first = LFM2.arch_from_hf(config), config.get("num_dense_layers", 2)
        router = Router(
            experts.top_k_of(config),
            "sigmoid",
            normalises=bool(config.get("norm_topk_prob", True)),
            epsilon=1e-6,
            factor=factor_of(config, "routed_scaling_factor"),
        )
        has_bias = bool(config.get("use_expert_bias", True))
        body = experts.read_experts(config, router, choice_bias=has_bias)
        layers = enumerate(arch.layers)
        return replace(
            arch, layers=tuple(y if i < first else replace(y, feed_forward=body) for i, y in layers)
        )


def _inner_size(config: Config) -> int:
    """Return the size of feed-forward blocks: two thirds of the config's, rounded up."""
    size = size_of(config, "block_ff_dim" if config.get("block_ff_dim") else "intermediate_size")
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    unit = size_of(config, "block_multiple_of", 256)
    size = int((config.get("block_ffn_dim_multiplier") or 1) * int(2 * size / 3))
    return -(-size // unit) * unit
