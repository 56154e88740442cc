"""Falcon-H1 has attention and Mamba-2 side by side in every layer, and factors on nearly all projections.

Factors of linear parts multiply weights once, while these are loaded.
"""

from dataclasses import replace

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.runtime.layers.side_by_side import SideBySideArch
from octavo.runtime.models.arch import Arch, Config, LayerArch, expect, factor_of, read_arch, read_heads
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.recurrent import read_mamba2, scan_weights
from octavo.runtime.models.weights import Transform, to

_PARTS = ("gate", "values", "keys", "queries", "step")
"""Of the projection before a scan, in their order in checkpoints."""


def _times(name: str) -> Transform:
    """Return what multiplies a weight, or a bias, by one of the layer's factors."""
    return lambda tensor, layer: _multiply(tensor, _body(layer).factors[name])


def _project(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    """Multiply the rows of each part by its factor; those of a weight by that of the input, too."""
    body = _body(layer)
    assert body.recurrent.scan is not None
    sizes = body.recurrent.scan.sizes
    sizes |= {"gate": sizes["values"], "step": body.recurrent.scan.num_heads}
    shared = body.factors["recurrent_in"] if tensor.dim() == 2 else 1.0
    rows = [torch.full((sizes[part],), body.factors[part] * shared) for part in _PARTS]
    factors = torch.cat(rows).to(tensor.device)
    if tensor.shape[:1] != factors.shape:
        return tensor
    return _multiply(tensor, factors[:, None] if tensor.dim() == 2 else factors)


def _multiply(tensor: Tensor, factor: Tensor | float) -> Tensor:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise Unsupported("Falcon-H1's factors multiply plain weights: packed ones are not supported.")
    return (tensor.float() * factor).to(tensor.dtype)


def _body(layer: LayerArch | None) -> SideBySideArch:
    assert layer is not None and isinstance(layer.attention, SideBySideArch)
    return layer.attention


class FalconH1(Decoder):
    """Norms of what Mamba-2 gives are left out in some sizes."""

    WEIGHTS = Decoder.WEIGHTS.replace(
        scan_weights("layers.*.mamba", "layers.*.attention.recurrent")
        | {
            "final_layernorm": to("norm"),
            "layers.*.pre_ff_layernorm": to("layers.*.mlp_norm"),
            "layers.*.mamba.in_proj": to("layers.*.attention.recurrent.project", "", _project),
            "layers.*.mamba.out_proj": to("layers.*.attention.recurrent.out", "", _times("recurrent_out")),
            "layers.*.self_attn.q_proj": to("layers.*.attention.heads.qkv", "q"),
            "layers.*.self_attn.k_proj": to("layers.*.attention.heads.qkv", "k"),
            "layers.*.self_attn.v_proj": to("layers.*.attention.heads.qkv", "v"),
            "layers.*.self_attn.o_proj": to("layers.*.attention.heads.out", "", _times("heads_out")),
            "layers.*.feed_forward.gate_proj": to("layers.*.mlp.up", "gate", _times("mlp_gate")),
            "layers.*.feed_forward.up_proj": to("layers.*.mlp.up", "up"),
            "layers.*.feed_forward.down_proj": to("layers.*.mlp.down", "", _times("mlp_down")),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read sizes and factors. Scores have that of keys, and twice that of what attention reads."""
        config = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8} | config
        expect(config, attention_bias=False, projectors_bias=bool(config.get("mamba_proj_bias")))
        entry, plain = factor_of(config, "attention_in_multiplier"), read_heads(config)
        scale = plain.scale * factor_of(config, "key_multiplier") * entry**2
        mamba = read_mamba2(config)
        has_norm, norm_first = bool(config.get("mamba_rms_norm")), config.get("mamba_norm_before_gate", True)
        body = SideBySideArch(
            heads=replace(plain, scale=scale),
            recurrent=replace(mamba, has_norm=has_norm, norm_first=bool(norm_first)),
            factors={
                "heads_out": factor_of(config, "attention_out_multiplier") * entry,
                "recurrent_in": factor_of(config, "ssm_in_multiplier"),
                "recurrent_out": factor_of(config, "ssm_out_multiplier"),
                **_several(config, "ssm_multipliers", _PARTS),
                **_several(config, "mlp_multipliers", ("mlp_gate", "mlp_down")),
            },
        )
        return read_arch(
            config,
            attention=body,
            embedding_scale=factor_of(config, "embedding_multiplier"),
            logit_scale=factor_of(config, "lm_head_multiplier"),
        )


def _several(config: Config, name: str, parts: tuple[str, ...]) -> dict[str, float]:
    given = config.get(name) or [1.0] * len(parts)
    if not isinstance(given, list | tuple) or len(given) != len(parts):
        raise BadCheckpoint(f"The config's {name} must be {len(parts)} numbers; found {given!r:.80}")
    return {part: factor_of({part: value}, part) for part, value in zip(parts, given, strict=True)}
