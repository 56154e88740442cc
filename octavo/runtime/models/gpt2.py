"""GPT-2 learns its positions, and has layer norms and a plain MLP; checkpoints hold [inputs, outputs]."""

from octavo.base.errors import Unsupported
from octavo.runtime.models.arch import Arch, Config, read_arch, read_dense, read_heads, read_norm, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import WeightMap, to, transpose

_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}


def usual_names(config: Config) -> Config:
    """Return the config with GPT-2's names also in the usual spelling."""
    usual = {ours: config.get(theirs) for ours, theirs in _NAMES.items()}
    return usual | config | {"hidden_act": config.get("activation_function") or "gelu_new"}


class GPT2(Decoder):
    """GPT-2 stores queries, keys and values as one matrix."""

    WEIGHTS = WeightMap(
        {
            "wte": to("embed_tokens"),
            "wpe": to("embed_positions"),
            "ln_f": to("norm"),
            "lm_head": to("lm_head"),
            "h.*.ln_1": to("layers.*.attention_norm"),
            "h.*.attn.c_attn": to("layers.*.attention.qkv", "", transpose),
            "h.*.attn.c_proj": to("layers.*.attention.out", "", transpose),
            "h.*.ln_2": to("layers.*.mlp_norm"),
            "h.*.mlp.c_fc": to("layers.*.mlp.up", "", transpose),
            "h.*.mlp.c_proj": to("layers.*.mlp.down", "", transpose),
        },
        prefix="transformer.",
        ignored=(r"\.attn\.(masked_)?bias$",),  # the causal mask
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        if config.get("scale_attn_by_inverse_layer_idx") or config.get("scale_attn_weights") is False:
            raise Unsupported("GPT-2 with scale_attn_by_inverse_layer_idx, or without scale_attn_weights")
        config = usual_names({"tie_word_embeddings": True} | config)
        return read_arch(
            config,
            attention=read_heads(config, qkv_bias=True, out_bias=True),
            feed_forward=read_dense(config, gated=False, bias=True),
            rope=None,
            num_learned_positions=size_of(config, "max_position_embeddings"),
            norm=read_norm(config),
        )
