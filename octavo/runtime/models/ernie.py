"""ERNIE 4.5 is a Llama whose rope rotates neighbours; also with experts."""

from typing import Any

from torch import Tensor

from octavo.runtime.layers.experts import Router
from octavo.runtime.models import experts
from octavo.runtime.models.arch import Arch, Config, LayerArch, read_arch, read_dense, read_heads, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to


class Ernie45(Decoder):
    """One switch gives all projections biases."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        return _read(config)


def _row(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    return tensor.flatten()


class Ernie45MoE(Ernie45):
    """Experts are chosen by softmax and a bias that balances them; the first layers are dense."""

    has_spare_layers = True
    _BIAS = to("layers.*.mlp.choice.bias", "", _row)
    WEIGHTS = Ernie45.WEIGHTS.replace(
        experts.routed()
        | experts.shared("layers.*.mlp.shared_experts")
        | {
            "layers.*.mlp.moe_statics.e_score_correction_bias": _BIAS,
            "layers.*.mlp.gate.moe_statics.e_score_correction_bias": _BIAS,
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read which layers have experts: every `moe_layer_interval`-th from one layer to another."""
        names = {"moe_num_experts": "num_experts", "moe_num_shared_experts": "n_shared_experts"}
        given: Config = {"moe_num_shared_experts": 2, "moe_num_experts": 64} | config
        given |= {ours: given[theirs] for theirs, ours in names.items()}
        router = Router(size_of(given, "moe_k", 6), normalises=True)
        shared = experts.read_shared(given)
        arch = _read(given, experts.read_experts(given, router, shared=shared, choice_bias=True))
        first, last = given.get("moe_layer_start_index", 1), given.get("moe_layer_end_index", -1)
        last, every = len(arch.layers) - 1 if last == -1 else last, size_of(given, "moe_layer_interval", 1)
        return experts.with_dense_layers(given, arch, lambda i: (i + 1) % every > 0 or not first <= i <= last)


def _read(config: Config, body: Any = None) -> Arch:
    config = {"head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True} | config
    bias = bool(config.get("use_bias"))
    return read_arch(
        config,
        attention=read_heads(config, qkv_bias=bias, out_bias=bias),
        feed_forward=body or read_dense(config, bias=bias),
        interleaved_rope=True,
    )
