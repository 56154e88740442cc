"""What families with experts share: routers, by the families that have them, and names in checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.runtime.layers.experts import ExpertsArch, Router
from octavo.runtime.layers.mlp import DenseArch
from octavo.runtime.models.arch import (
    Arch,
    Config,
    LayerArch,
    factor_of,
    read_activation,
    read_dense,
    size_of,
)
from octavo.runtime.models.weights import Target, to

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_experts(config: Config, router: Router, **own: Any) -> ExpertsArch:
    """Read the sizes of experts; `own` are the fields that the family adds or replaces."""
    size = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    common: Config = {
        "num_experts": size_of(config, next((name for name in _COUNTS if name in config), _COUNTS[0])),
        "intermediate_size": size_of(config, size),
        "activation": read_activation(config),
    }
    return ExpertsArch(router=router, **common | own)


def with_dense_layers(config: Config, arch: Arch, is_dense: Callable[[int], bool]) -> Arch:
    """Return the same model with a dense block of `intermediate_size` in some layers."""
    dense = read_dense(config)
    layers = enumerate(arch.layers)
    return replace(
        arch, layers=tuple(replace(y, feed_forward=dense) if is_dense(i) else y for i, y in layers)
    )


def with_first_dense(config: Config, arch: Arch) -> Arch:
    """Return the same model with dense blocks in its first layers."""
    first = config.get("first_k_dense_replace") or 0
    if not isinstance(first, int) or first < 0:
        raise BadCheckpoint(f"first_k_dense_replace must be a number of layers; found {first!r:.60}")
    return with_dense_layers(config, arch, lambda i: i < first) if first else arch


def top_k_of(config: Config) -> int:
    """Return how many experts a token takes."""
    return size_of(config, "num_experts_per_tok")


def qwen(config: Config) -> Router:
    """Return Qwen's router, and OLMoE's: softmax, and some models normalise."""
    return Router(top_k_of(config), normalises=bool(config.get("norm_topk_prob")))


def mixtral(config: Config) -> Router:
    """Return Mixtral's router: softmax, and weights that add up to 1."""
    return Router(top_k_of(config), normalises=True)


def granite(config: Config) -> Router:
    """Return the router of GraniteMoE and gpt-oss: a softmax over the logits of the chosen ones."""
    return Router(top_k_of(config), "logits")


def deepseek_v2(config: Config) -> Router:
    """Return DeepSeek-V2's router: softmax; in the large models, of the groups with the best experts."""
    router = Router(top_k_of(config), factor=factor_of(config, "routed_scaling_factor"))
    method = config.get("topk_method") or "greedy"
    if method == "greedy":
        return router
    if method != "group_limited_greedy":
        raise Unsupported(f"topk_method={method!r} is not supported: greedy and group_limited_greedy are.")
    return router._replace(num_groups=size_of(config, "n_group"), top_groups=size_of(config, "topk_group"))


def deepseek_v3(config: Config) -> Router:
    """Return the router of DeepSeek-V3, Kimi-K2 and GLM-4.5: sigmoid, groups by their two best experts."""
    return Router(
        top_k_of(config),
        "sigmoid",
        normalises=bool(config.get("norm_topk_prob", True)),
        epsilon=1e-20,
        factor=factor_of(config, "routed_scaling_factor"),
        num_groups=size_of(config, "n_group", 1),
        top_groups=size_of(config, "topk_group", 1),
        best_of_group=2,
    )


def read_shared(config: Config) -> DenseArch | None:
    """Return what all tokens take: `n_shared_experts` of the size of the others, as one."""
    if not config.get("n_shared_experts"):
        return None
    size = size_of(config, "n_shared_experts") * size_of(config, "moe_intermediate_size")
    return read_dense(config, intermediate_size=size)


DEEPSEEK = {"layers.*.mlp.gate.e_score_correction_bias": to("layers.*.mlp.choice.bias")}
"""What its routers have beside others."""


def routed(
    prefix: str = "layers.*.mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, Target]:
    """Return rules for a router, and for experts: in a tensor each, or all together.

    Those are gate_up_proj [E, 2 I, H] and down_proj [E, H, I].
    """
    theirs, ours, scales = f"{prefix}.experts", "layers.*.mlp.experts", "weight_scale_inv"
    return {
        f"{prefix}.gate": to("layers.*.mlp.router"),
        f"{theirs}.gate_up_proj": to(f"{ours}.up.weight", "", part_gates),
        f"{theirs}.down_proj": to(f"{ours}.down.weight"),
        f"{theirs}.gate_up_proj_scale_inv": to(f"{ours}.up.{scales}", "", part_gates),
        f"{theirs}.down_proj_scale_inv": to(f"{ours}.down.{scales}"),
        f"{theirs}.*.{gate}": to(f"{ours}.up", "*.gate"),
        f"{theirs}.*.{up}": to(f"{ours}.up", "*.up"),
        f"{theirs}.*.{down}": to(f"{ours}.down", "*"),
    }


def stacked_by_inputs(prefix: str = "layers.*.mlp.experts") -> dict[str, Target]:
    """Return rules for stacks, inputs first, [E, H, 2 I] and [E, I, H]; or as above, by their shapes."""
    return {
        f"{prefix}.gate_up_proj": to("layers.*.mlp.experts.up.weight", "", _turned_gates),
        f"{prefix}.down_proj": to("layers.*.mlp.experts.down.weight", "", _turned),
    }


def _turned_gates(tensor: Tensor, layer: LayerArch | None) -> Any:
    is_turned = layer is not None and tensor.shape[1] != 2 * _inner_size(layer)
    return part_gates(tensor.transpose(1, 2) if is_turned else tensor, layer)


def _turned(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    is_turned = layer is not None and tensor.shape[2] != _inner_size(layer)
    return tensor.transpose(1, 2) if is_turned else tensor


def _inner_size(layer: LayerArch) -> int:
    return layer.feed_forward.intermediate_size


def shared(prefix: str) -> dict[str, Target]:
    """Return rules for the experts that all tokens take."""
    return {
        f"{prefix}.gate_proj": to("layers.*.mlp.shared.up", "gate"),
        f"{prefix}.up_proj": to("layers.*.mlp.shared.up", "up"),
        f"{prefix}.down_proj": to("layers.*.mlp.shared.down"),
    }


def part_gates(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    """Turn [E, 2 I, H] to [2 E, I, H]: gates and values of each expert behind each other."""
    if tensor.dim() != 3 or tensor.shape[1] % 2:
        raise BadCheckpoint(f"a stack of experts has three axes, the second even; found {list(tensor.shape)}")
    return tensor.reshape(2 * tensor.shape[0], -1, tensor.shape[2])
