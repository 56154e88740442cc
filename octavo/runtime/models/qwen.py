"""Qwen 2 and 2.5 have biases on q, k, v; Qwen 3 has norms on the heads of q and k; both come with experts.

In Qwen 2 with experts all tokens share one more expert, which has a gate.
"""

from dataclasses import replace

from octavo.base.errors import BadCheckpoint
from octavo.runtime.models import experts
from octavo.runtime.models.arch import Arch, Config, read_arch, read_dense, read_heads, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to


def windowed(config: Config) -> Config:
    """Return the config with a window only on layers that have one: those from `max_window_layers` on."""
    if not config.get("use_sliding_window"):
        return {**config, "sliding_window": None, "layer_types": None}
    if config.get("layer_types"):
        return config
    first, count = config.get("max_window_layers", 28), int(config["num_hidden_layers"])
    kinds = ["full_attention" if i < first else "sliding_attention" for i in range(count)]
    return {**config, "layer_types": kinds}


class Qwen2(Decoder):
    """Qwen 2 is a Llama with biases on queries, keys and values."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Add the biases, which are not in the config."""
        config = windowed(config)
        return read_arch(config, attention=read_heads(config, qkv_bias=True, out_bias=False))


class Qwen3(Decoder):
    """Qwen 3 is a Llama with normalised queries and keys, and heads of a size of their own."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Give a head 128 components unless the config says otherwise."""
        config = {"head_dim": 128} | windowed(config)
        return read_arch(config, attention=read_heads(config, qk_norm="head"))


class Qwen3MoE(Decoder):
    """Qwen 3 with experts."""

    WEIGHTS = Decoder.WEIGHTS.replace(experts.routed())

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        config = windowed(config)
        feed_forward = experts.read_experts(config, experts.qwen(config))
        heads = read_heads(config, qk_norm="head")
        return _mixed(config, read_arch(config, attention=heads, feed_forward=feed_forward))


class Qwen2MoE(Decoder):
    """Qwen 2 with experts."""

    WEIGHTS = Qwen3MoE.WEIGHTS.replace(
        experts.shared("layers.*.mlp.shared_expert")
        | {"layers.*.mlp.shared_expert_gate": to("layers.*.mlp.shared_gate")}
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Add the shared expert, and the biases of queries, keys and values."""
        config = windowed(config)
        heads = read_heads(config, qkv_bias=bool(config.get("qkv_bias", True)), out_bias=False)
        return with_experts(config, read_arch(config, attention=heads))


def with_experts(config: Config, arch: Arch) -> Arch:
    """Return the same model with experts, and a shared one that has a gate."""
    shared = read_dense(config, intermediate_size=size_of(config, "shared_expert_intermediate_size"))
    feed_forward = experts.read_experts(config, experts.qwen(config), shared=shared, gates_shared=True)
    layers = tuple(replace(layer, feed_forward=feed_forward) for layer in arch.layers)
    return _mixed(config, replace(arch, layers=layers))


def _mixed(config: Config, arch: Arch) -> Arch:
    step, dense = size_of(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise BadCheckpoint(f"mlp_only_layers must be a list of layers; found {dense!r:.60}")
    if step == 1 and not dense:
        return arch
    return experts.with_dense_layers(config, arch, lambda i: i in dense or bool((i + 1) % step))
