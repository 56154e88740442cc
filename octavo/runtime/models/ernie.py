"""ERNIE 4.5 is a Llama whose rope rotates neighbours; it comes with experts, too."""

from torch import Tensor

from octavo.runtime.layers.experts import Router
from octavo.runtime.models import experts
from octavo.runtime.models.arch import (
    Arch,
    Config,
    LayerArch,
    factor_of,
    read_arch,
    read_dense,
    read_heads,
    size_of,
)
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to


def _flat(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    return tensor.flatten()


_BIAS = to("layers.*.mlp.choice.bias", "", _flat)


class Ernie45(Decoder):
    """One switch gives all projections biases."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        config = {"head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True} | config
        bias = bool(config.get("use_bias"))
        return read_arch(
            config,
            attention=read_heads(config, qkv_bias=bias, out_bias=bias),
            feed_forward=read_dense(config, bias=bias),
            interleaved_rope=True,
        )


class Ernie45MoE(Decoder):
    """A bias balances the choice of experts; some layers at both ends may have none."""

    has_spare_layers = True
    WEIGHTS = Decoder.WEIGHTS.replace(
        experts.stacked()
        | experts.apart()
        | experts.shared("layers.*.mlp.shared_experts")
        | {
            "layers.*.mlp.gate": to("layers.*.mlp.router"),
            "layers.*.mlp.gate.moe_statics.e_score_correction_bias": _BIAS,
            "layers.*.mlp.moe_statics.e_score_correction_bias": _BIAS,
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read the names of its own that sizes have."""
        config = {
            "num_experts": config.get("moe_num_experts", 64),
            "num_experts_per_tok": config.get("moe_k", 6),
            "n_shared_experts": config.get("moe_num_shared_experts", 2),
            "moe_intermediate_size": 1536,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        } | config
        router = Router(
            experts.top_k_of(config), normalises=True, epsilon=factor_of(config, "moe_norm_min", 1e-12)
        )
        bias, count = bool(config.get("use_bias")), size_of(config, "num_hidden_layers")
        arch = read_arch(
            config,
            attention=read_heads(config, qkv_bias=bias, out_bias=bias),
            feed_forward=experts.read_experts(
                config, router, shared=experts.read_shared(config), choice_bias=True
            ),
            interleaved_rope=True,
        )
        first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
        step, last = size_of(config, "moe_layer_interval", 1), count - 1 if last == -1 else last
        sparse = {i for i in range(count) if (i + 1) % step == 0 and first <= i <= last}
        return experts.with_dense_layers(config | {"mlp_bias": bias}, arch, lambda i: i not in sparse)
