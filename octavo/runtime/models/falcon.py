"""Falcon has attention beside the MLP, and one key head for all queries (7B) or each group of them (40B)."""

from octavo.base.errors import Unsupported
from octavo.runtime.models import arch
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import WeightMap, to, ungroup_qkv


class Falcon(Decoder):
    """Falcon stores the rows of a group's queries, then those of its key and of its value head."""

    WEIGHTS = WeightMap(
        {
            "word_embeddings": to("embed_tokens"),
            "ln_f": to("norm"),
            "lm_head": to("lm_head"),
            "h.*.input_layernorm": to("layers.*.attention_norm"),
            "h.*.ln_attn": to("layers.*.attention_norm"),
            "h.*.self_attention.query_key_value": to("layers.*.attention.qkv", "", ungroup_qkv),
            "h.*.self_attention.dense": to("layers.*.attention.out"),
            "h.*.post_attention_layernorm": to("layers.*.mlp_norm"),
            "h.*.ln_mlp": to("layers.*.mlp_norm"),
            "h.*.mlp.dense_h_to_4h": to("layers.*.mlp.up"),
            "h.*.mlp.dense_4h_to_h": to("layers.*.mlp.down"),
        },
        prefix="transformer.",
    )

    @staticmethod
    def arch_from_hf(config: arch.Config) -> arch.Arch:
        """Read the three switches that make the variants. Raises Unsupported for ALiBi."""
        if config.get("alibi"):
            raise Unsupported(
                "Falcon with alibi=True (falcon-rw) is not supported: attention here has no position biases. "
                "The rotary Falcons are: falcon-7b, falcon-40b, falcon-180B, falcon-11B."
            )
        config = {
            "tie_word_embeddings": True,
            **config,
            "hidden_act": config.get("activation") or "gelu",
            "intermediate_size": config.get("ffn_hidden_size"),
            "num_key_value_heads": _kv_heads(config),
        }
        bias = bool(config.get("bias"))
        parallel = bool(config.get("parallel_attn", True) or config.get("new_decoder_architecture"))
        return arch.read_arch(
            config,
            residual="parallel" if parallel else "serial",
            norms=_norms(config, parallel),
            norm=arch.read_norm(config),
            attention=arch.read_heads(config, qkv_bias=bias, out_bias=bias),
            feed_forward=arch.read_dense(config, gated=False, bias=bias),
        )


def _kv_heads(config: arch.Config) -> int:
    num_heads = arch.size_of(config, "num_attention_heads")
    if config.get("new_decoder_architecture"):
        return arch.size_of(config, "num_kv_heads", num_heads)
    return 1 if config.get("multi_query", True) else num_heads


def _norms(config: arch.Config, parallel: bool) -> frozenset[arch.Place]:
    """Return the norms: side by side, only the new architecture has one for each, and 11B does without."""
    two = config.get("new_decoder_architecture") and (config.get("num_ln_in_parallel_attn") or 2) == 2
    return arch.PRE_NORMS if two or not parallel else frozenset({"attention_in"})
