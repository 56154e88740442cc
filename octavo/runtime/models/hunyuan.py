"""Hunyuan (V1) normalises the heads of queries and keys behind the rope; also with experts."""

from typing import Any

from octavo.base.errors import Unsupported
from octavo.runtime.models import experts
from octavo.runtime.models.arch import Arch, Config, read_arch, read_dense, read_heads, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to


class Hunyuan(Decoder):
    """The rope's base is stretched once and for all, whatever the length of a text."""

    WEIGHTS = Decoder.WEIGHTS.replace(
        {
            "layers.*.self_attn.query_layernorm": to("layers.*.attention.q_norm"),
            "layers.*.self_attn.key_layernorm": to("layers.*.attention.k_norm"),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        return _read(config)


class HunyuanMoE(Hunyuan):
    """Every layer has experts, and a block that all tokens take."""

    WEIGHTS = Hunyuan.WEIGHTS.replace(
        experts.routed()
        | experts.shared("layers.*.mlp.shared_mlp")
        | {"layers.*.mlp.gate.wg": to("layers.*.mlp.router")}
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read the experts, of which early configs have a list of numbers, one per layer."""
        given = {name: value for name, value in config.items() if name != "moe_intermediate_size"}
        given |= {name: _one(config, name) for name in ("num_experts", "moe_topk")}
        given["num_experts_per_tok"] = given["moe_topk"]
        body = experts.read_experts(given, experts.mixtral(given), shared=read_dense(given))
        return _read(given, feed_forward=body)


def _read(config: Config, **own: Any) -> Arch:
    config = dict(config, rms_norm_eps=config.get("rms_norm_eps") or 1e-5)
    heads = read_heads(config, qk_norm="head", norms_rotated=True)
    rope: Config = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if rope.get("alpha"):
        dim, theta = heads.head_dim, rope.get("rope_theta") or config.get("rope_theta") or 10000.0
        rope = {"rope_type": "default", "rope_theta": theta * rope["alpha"] ** (dim / (dim - 2))}
        config |= {"rope_parameters": rope, "rope_scaling": None}
    return read_arch(config, attention=heads, **own)


def _one(config: Config, name: str) -> int:
    """Return the entry, of which a list must have the same for all layers. Raises Unsupported."""
    given = config.get(name)
    if isinstance(given, list) and given:
        if len(set(map(str, given))) > 1:
            raise Unsupported(f"{name} must be the same in all layers; found {given!r:.80}")
        given = given[0]
    return size_of({name: given}, name)
