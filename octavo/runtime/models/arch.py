"""`Arch`: an architecture as numbers, read once from a config in Hugging Face's form.

`read_arch` knows the names that most families share, in the spelling of transformers 4 and 5; a family's
`arch_from_hf` adds what is its own. Nobody else reads a config: models and layers see an `Arch`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.messages.kv import KVCacheSpec
from octavo.runtime.kernels.cache_layout import make_spec
from octavo.runtime.layers.rotary import DividedRope, LinearRope, Llama3Rope, LongRope, Rope, YarnRope

Config = dict[str, Any]
Place = Literal["attention_in", "attention_out", "mlp_in", "mlp_out"]

PRE_NORMS: frozenset[Place] = frozenset({"attention_in", "mlp_in"})
RESIDUAL_NORMS: frozenset[Place] = frozenset({"attention_out", "mlp_out"})
SANDWICH_NORMS = PRE_NORMS | RESIDUAL_NORMS

ROPES: dict[str, type[Rope]] = {
    "default": Rope,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "divided": DividedRope,
    "longrope": LongRope,
    # Changes nothing within the context that the model was made for, and no longer one is accepted.
    "dynamic": Rope,
}


@dataclass(frozen=True, kw_only=True)
class LayerArch:
    """What may differ by layer. sliding_window: positions a query sees, 0 = all; rope: None = no rotation."""

    sliding_window: int = 0
    rope: Rope | None = None


@dataclass(frozen=True, kw_only=True)
class Arch:
    """A decoder of transformer blocks: sizes first, then how its parts are built, then factors."""

    vocab_size: int
    hidden_size: int
    embedding_size: int = 0
    """Of the token embeddings and of what the head receives; 0 = hidden_size."""
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerArch, ...]
    num_learned_positions: int = 0
    tied_head: bool = False

    residual: Literal["serial", "parallel", "normalised"] = "serial"
    """Attention, then MLP; both from the same stream (without "mlp_in", one norm serves both); or each
    followed by the norm of the stream itself, as in the first transformer."""
    norms: frozenset[Place] = PRE_NORMS
    final_norm: bool = True
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_weight: bool = True
    norm_bias: bool = False
    norm_eps: float = 1e-6
    qk_norm: Literal["none", "head", "each_head", "all_heads"] = "none"
    """Normalise each head of queries and keys, with weights that all heads share or that each has its own;
    or all heads as one vector."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    activation: str = "silu"
    gated_mlp: bool = True

    attention_scale: float
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Of what attention and MLP add to the stream, where no norm stands behind them; serial layers only."""

    def __post_init__(self) -> None:
        for rope in {layer.rope for layer in self.layers if layer.rope}:
            if not 0 < rope.dim <= self.head_dim or rope.dim % 2:
                allowed = f"an even number up to {self.head_dim}"
                raise BadCheckpoint(f"{rope.dim} components of a head cannot rotate: it must be {allowed}")

    @property
    def adds_in_norms(self) -> bool:
        """Whether what a serial layer gives goes to an RMS norm that adds it to the stream, as it is."""
        return (
            self.norm_kind == "rms"
            and self.norms == PRE_NORMS
            and self.final_norm
            and self.residual_scale == 1.0
        )

    def kv_specs(self, tp_size: int, dtype: torch.dtype) -> list[KVCacheSpec]:
        """The cache of each layer on one rank, in numbers of this type. Raises Unsupported."""
        heads = max(self.num_kv_heads // tp_size, 1)
        return [make_spec(heads, self.head_dim, dtype, layer.sliding_window) for layer in self.layers]


def read_arch(config: Config, *, interleaved_rope: bool = False, **own: Any) -> Arch:
    """The fields that most configs share, and those that the family adds or replaces by keyword.

    Raises BadCheckpoint for a missing or impossible size, Unsupported for an unknown kind of layer or rope.
    """
    hidden_size, num_heads = size_of(config, "hidden_size"), size_of(config, "num_attention_heads")
    if not config.get("head_dim") and hidden_size % num_heads:
        raise BadCheckpoint(f"hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}")
    head_dim = size_of(config, "head_dim", hidden_size // num_heads)
    num_kv_heads = size_of(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise BadCheckpoint(
            f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}"
        )
    common: dict[str, Any] = {
        "vocab_size": size_of(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": size_of(config, "intermediate_size", 4 * hidden_size),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "tied_head": bool(config.get("tie_word_embeddings")),
        "norm_eps": config.get("rms_norm_eps") or 1e-6,
        "activation": config.get("hidden_act") or config.get("hidden_activation") or "silu",
        "attention_scale": head_dim**-0.5,
    }
    if "layers" not in own:
        common["layers"] = read_layers(config, head_dim, interleaved_rope)
    return Arch(**common | own)


def read_layers(config: Config, head_dim: int, interleaved: bool = False) -> tuple[LayerArch, ...]:
    """One entry per layer, from `layer_types` if there are any; otherwise all layers are alike."""
    count, window = size_of(config, "num_hidden_layers"), config.get("sliding_window") or 0
    default = "sliding_attention" if window else "full_attention"
    kinds = config.get("layer_types") or [default] * count
    if len(kinds) != count or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise Unsupported(
            f"layer_types must name full_attention or sliding_attention for all {count} layers; found {kinds}"
        )
    if "sliding_attention" in kinds and not window:
        raise BadCheckpoint("layer_types has sliding_attention, but sliding_window gives no size")
    made = {
        kind: LayerArch(
            sliding_window=window if kind == "sliding_attention" else 0,
            rope=read_rope(config, head_dim, kind, interleaved),
        )
        for kind in set(kinds)
    }
    return tuple(made[kind] for kind in kinds)


def read_rope(config: Config, head_dim: int, kind: str = "", interleaved: bool = False) -> Rope:
    """The rope of layers of `kind`: `rope_parameters` (transformers 5), `rope_scaling`, `rope_theta` (4)."""
    given = dict(config.get("rope_parameters") or {})
    if isinstance(given.get(kind), Mapping):
        given = dict(given[kind])
    given |= config.get("rope_scaling") or {}
    name = given.get("rope_type") or given.get("type") or "default"
    if name not in ROPES:
        raise Unsupported(f"Rope {name!r} is not supported. Supported: {', '.join(sorted(ROPES))}.")
    rotated = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    given |= {
        "dim": int(head_dim * rotated),
        "theta": float(given.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "interleaved": interleaved,
    }
    longest = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings")
    if original or "original_max_position_embeddings" not in given:
        given["original_max_position_embeddings"] = original or longest
    given |= {
        "max_position_embeddings": longest,
        "max_model_len": config.get("max_model_len") or longest,
    }
    cls: Any = ROPES[name]
    own = {f.name: given[f.name] for f in fields(cls) if given.get(f.name) is not None}
    try:
        rope: Rope = cls(**{n: tuple(v) if isinstance(v, list) else v for n, v in own.items()})
    except TypeError as error:
        raise BadCheckpoint(f"Rope {name!r} lacks a parameter: {error}") from error
    return rope


def size_of(config: Config, name: str, default: int | None = None) -> int:
    """The entry `name` as a positive integer. Raises BadCheckpoint."""
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadCheckpoint(f"The config's {name} must be a positive integer; found {value!r}")
    return value


def factor_of(config: Config, name: str, default: float = 1.0) -> float:
    """The entry `name` as a positive number. Raises BadCheckpoint."""
    value = config.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise BadCheckpoint(f"The config's {name} must be a positive number; found {value!r}")
    return float(value)


def expect(config: Config, **values: Any) -> None:
    """Raise Unsupported if the config has one of these entries with another value."""
    for name, value in values.items():
        if config.get(name) not in (None, value):
            raise Unsupported(f"{name}={config[name]!r} is not supported, only {name}={value!r} is.")
