"""What families with recurrent layers share: kinds of layers, sizes of Mamba-2, and names in checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.base.errors import Unsupported
from octavo.runtime.layers.build import Stored
from octavo.runtime.layers.recurrent import RecurrentArch, ScanArch
from octavo.runtime.models.arch import Arch, Config, LayerArch, size_of
from octavo.runtime.models.weights import Target, Transform, to

_RECURRENT, _ATTENTION = {"conv", "mamba", "linear_attention"}, {"attention", "full_attention"}


def with_recurrent_layers(config: Config, arch: Arch, recurrent: RecurrentArch) -> Arch:
    """Return the same model with `recurrent` in some layers, by `layer_types`. Raises Unsupported."""
    kinds, known, count = config.get("layer_types") or [], _RECURRENT | _ATTENTION, len(arch.layers)
    if len(kinds) != count or not known.issuperset(kinds):
        names = ", ".join(sorted(known))
        raise Unsupported(f"layer_types must name {names} for all {count} layers; found {kinds!r:.200}")
    pairs = zip(arch.layers, kinds, strict=True)
    layers = (replace(y, attention=recurrent, rope=None) if kind in _RECURRENT else y for y, kind in pairs)
    return replace(arch, layers=tuple(layers))


def read_mamba2(config: Config) -> RecurrentArch:
    """Read the sizes of Mamba-2 layers."""
    heads, limits = size_of(config, "mamba_n_heads"), config.get("time_step_limit") or (0.0, "inf")
    expanded = size_of(config, "mamba_expand", 2) * size_of(config, "hidden_size")
    # JSON has no infinity: transformers writes {"__float__": "Infinity"}.
    least, most = (float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits)
    scan = ScanArch(
        num_heads=heads,
        value_size=size_of(config, "mamba_d_ssm", expanded) // heads,
        key_size=size_of(config, "mamba_d_state"),
        num_groups=size_of(config, "mamba_n_groups", 1),
        is_delta=False,
        limits=(least, most),
    )
    biases = {"bias": bool(config.get("mamba_proj_bias")), "conv_bias": config.get("mamba_conv_bias", True)}
    taps, num_drafts = size_of(config, "mamba_d_conv", 4), config.get("num_drafts", 0)
    return RecurrentArch(taps=taps, scan=scan, num_drafts=num_drafts, **biases)


def scan_weights(prefix: str, place: str = "layers.*.attention") -> dict[str, Target]:
    """Return rules for the tensors of Mamba-2, which those of delta nets add to."""
    return {
        f"{prefix}.in_proj": to(f"{place}.project"),
        f"{prefix}.conv1d.weight": to(f"{place}.conv", "", conv_rows),
        f"{prefix}.conv1d.bias": to(f"{place}.conv_bias"),
        f"{prefix}.A_log": to(f"{place}.rate", "", lambda logarithm, _: -logarithm.float().exp()),
        f"{prefix}.dt_bias": to(f"{place}.step_bias"),
        f"{prefix}.D": to(f"{place}.skip"),
        f"{prefix}.norm.weight": to(f"{place}.norm"),
        f"{prefix}.out_proj": to(f"{place}.out"),
    }


def conv_rows(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    """Turn [channels, 1, taps] to [taps, channels]."""
    return tensor.squeeze(1).t()


def ungroup(shape: Callable[[Any], tuple[int, tuple[int, ...]]]) -> Transform:
    """Return what turns rows of N x (parts of some sizes) to all rows of each part; packed ones, too.

    shape: N and sizes, of the layer's attention. A wrong number of rows is left for the parameter to refuse.
    """

    def transform(tensor: Stored, layer: LayerArch | None) -> Stored:
        assert layer is not None
        count, sizes = shape(layer.attention)
        rows = torch.arange(count * sum(sizes))
        if tensor.shape[:1] != rows.shape:
            return tensor
        parts = torch.split(rows.view(count, -1), list(sizes), 1)
        return tensor.index_select(0, torch.cat([part.flatten() for part in parts]))

    return transform
