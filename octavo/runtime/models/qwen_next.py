"""Qwen3-Next and Qwen 3.5 have gated delta nets in most layers, attention with a gate in the others.

Norms multiply by 1 + w, but those of the heads of delta nets.
"""

from dataclasses import replace

from octavo.runtime.layers.recurrent import RecurrentArch, ScanArch
from octavo.runtime.models.arch import Arch, Config, read_arch, read_heads, read_rope, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.gemma import plus_one
from octavo.runtime.models.qwen import Qwen2MoE, with_experts
from octavo.runtime.models.recurrent import scan_weights, ungroup, with_recurrent_layers
from octavo.runtime.models.weights import to

_DEFAULTS: Config = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "norm_topk_prob": True,
}
"""What transformers assumes where a config is silent."""

_of_gates = ungroup(lambda heads: (heads.num_heads, (heads.head_dim,) * 2))
"""Of attention, where (query, gate) of each head stand together."""
_of_inputs = ungroup(lambda net: (net.scan.num_groups, net.scan.group_sizes + net.scan.group_sizes[2:]))
_of_scores = ungroup(lambda net: (net.scan.num_groups, (net.scan.num_heads // net.scan.num_groups,) * 2))
"""Of delta nets, where (query, key, values, gates) and (strengths, steps) of each group do."""
_PROJECT = "layers.*.attention.project"
_NAMES = scan_weights("layers.*.linear_attn") | {
    "norm": to("norm", "", plus_one),
    "layers.*.input_layernorm": to("layers.*.attention_norm", "", plus_one),
    "layers.*.post_attention_layernorm": to("layers.*.mlp_norm", "", plus_one),
    "layers.*.self_attn.q_norm": to("layers.*.attention.q_norm", "", plus_one),
    "layers.*.self_attn.k_norm": to("layers.*.attention.k_norm", "", plus_one),
    "layers.*.self_attn.q_proj": to("layers.*.attention.qkv", "q", _of_gates),
    "layers.*.linear_attn.in_proj_qkvz": to(_PROJECT, "inputs", _of_inputs),
    "layers.*.linear_attn.in_proj_ba": to(_PROJECT, "scores", _of_scores),
    "layers.*.linear_attn.in_proj_qkv": to(_PROJECT, "conv.inputs"),
    "layers.*.linear_attn.in_proj_z": to(_PROJECT, "gate.inputs"),
    "layers.*.linear_attn.in_proj_b": to(_PROJECT, "strength.scores"),
    "layers.*.linear_attn.in_proj_a": to(_PROJECT, "step.scores"),
}
_MTP_NAMES = {
    "fc": to("fc"),
    "pre_fc_norm_embedding": to("embeds_norm", "", plus_one),
    "pre_fc_norm_hidden": to("states_norm", "", plus_one),
}
_IGNORED = (*Decoder.WEIGHTS.ignored, r"^mtp\.")
"""Layers for drafting, too."""


class Qwen35(Decoder):
    """Qwen 3.5, the text model, without experts."""

    MTP_NAMES = _MTP_NAMES
    WEIGHTS = replace(Decoder.WEIGHTS.replace(_NAMES), ignored=_IGNORED)

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read the sizes of delta nets, and which layers have attention."""
        config = _DEFAULTS | config
        every, count = size_of(config, "full_attention_interval", 4), size_of(config, "num_hidden_layers")
        if not config.get("layer_types"):
            config["layer_types"] = ["attention" if (i + 1) % every == 0 else "mamba" for i in range(count)]
        heads = read_heads(config, qk_norm="head", has_gate=True)
        scan = ScanArch(
            num_heads=size_of(config, "linear_num_value_heads"),
            value_size=size_of(config, "linear_value_head_dim"),
            key_size=size_of(config, "linear_key_head_dim"),
            num_groups=size_of(config, "linear_num_key_heads"),
            is_delta=True,
        )
        taps, num_drafts = size_of(config, "linear_conv_kernel_dim"), config.get("num_drafts", 0)
        delta = RecurrentArch(taps=taps, scan=scan, num_drafts=num_drafts)
        arch = read_arch(config, attention=heads, rope=read_rope(config, heads.head_dim))
        return with_recurrent_layers(config, arch, delta)


class Qwen35MoE(Qwen35):
    """Qwen 3.5, the text model, with experts in all layers, and one that all tokens share."""

    WEIGHTS = replace(Qwen2MoE.WEIGHTS.replace(_NAMES), ignored=_IGNORED)

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Add the experts, whose weights always add up to 1."""
        return with_experts(_DEFAULTS | config | {"norm_topk_prob": True}, Qwen35.arch_from_hf(config))


class Qwen3Next(Qwen35):
    """Qwen3-Next: experts in all layers, and one that all tokens share."""

    WEIGHTS = replace(Qwen2MoE.WEIGHTS.replace(_NAMES), ignored=_IGNORED)

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        return with_experts(_DEFAULTS | config, Qwen35.arch_from_hf(config))
