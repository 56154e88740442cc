"""GPT-NeoX and Pythia have attention beside or before the MLP, and rotate a part of each head."""

from octavo.runtime.models.arch import Arch, Config, read_arch, read_dense, read_heads, read_norm
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import WeightMap, to, ungroup_qkv


class GPTNeoX(Decoder):
    """GPT-NeoX stores the rows of a head's query, key and value side by side."""

    WEIGHTS = WeightMap(
        {
            "embed_in": to("embed_tokens"),
            "final_layer_norm": to("norm"),
            "embed_out": to("lm_head"),
            "lm_head": to("lm_head"),
            "layers.*.input_layernorm": to("layers.*.attention_norm"),
            "layers.*.attention.query_key_value": to("layers.*.attention.qkv", "", ungroup_qkv),
            "layers.*.attention.dense": to("layers.*.attention.out"),
            "layers.*.post_attention_layernorm": to("layers.*.mlp_norm"),
            "layers.*.mlp.dense_h_to_4h": to("layers.*.mlp.up"),
            "layers.*.mlp.dense_4h_to_h": to("layers.*.mlp.down"),
        },
        prefix="gpt_neox.",
        # The causal mask, and what the rotation is made of.
        ignored=(r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"),
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        config = {
            "hidden_act": "gelu",
            "partial_rotary_factor": config.get("rotary_pct", 0.25),
            "rope_theta": config.get("rotary_emb_base", 10_000),
        } | config
        bias = bool(config.get("attention_bias", True))
        return read_arch(
            config,
            residual="parallel" if config.get("use_parallel_residual", True) else "serial",
            norm=read_norm(config),
            attention=read_heads(config, qkv_bias=bias, out_bias=bias),
            feed_forward=read_dense(config, gated=False, bias=True),
        )
