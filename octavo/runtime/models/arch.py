"""An `Arch` describes an architecture in numbers, read once from a config in Hugging Face's form.

`read_arch` knows the names that most families share, in the spelling of transformers 4 and 5; a family's
`arch_from_hf` adds what is its own. Nobody else reads a config: models and layers see an `Arch`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.runtime.layers import rotary
from octavo.runtime.layers.experts import ExpertsArch
from octavo.runtime.layers.latent_attention import LatentArch
from octavo.runtime.layers.mlp import DenseArch
from octavo.runtime.layers.norm import NormArch
from octavo.runtime.layers.recurrent import RecurrentArch
from octavo.runtime.layers.self_attention import HeadsArch
from octavo.runtime.layers.side_by_side import SideBySideArch

Config = dict[str, Any]
Place = Literal["attention_in", "attention_out", "mlp_in", "mlp_out"]

PRE_NORMS: frozenset[Place] = frozenset({"attention_in", "mlp_in"})
RESIDUAL_NORMS: frozenset[Place] = frozenset({"attention_out", "mlp_out"})
SANDWICH_NORMS = PRE_NORMS | RESIDUAL_NORMS

_ACTIVATION_NAMES = ("hidden_act", "hidden_activation", "activation_function", "activation")
_EPS_NAMES = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")

ROPES: dict[str, type[rotary.Rope]] = {
    "default": rotary.Rope,
    "mrope": rotary.Rope,
    "linear": rotary.LinearRope,
    "llama3": rotary.Llama3Rope,
    "yarn": rotary.YarnRope,
    "ntk": rotary.NTKRope,
    "divided": rotary.DividedRope,
    "longrope": rotary.LongRope,
    # Changes nothing within the context that the model was made for, and no longer one is accepted.
    "dynamic": rotary.Rope,
}


@dataclass(frozen=True, kw_only=True)
class LayerArch:
    """A LayerArch describes one layer.

    sliding_window: positions a query sees, 0 = all; rope: None = no rotation
    """

    attention: HeadsArch | LatentArch | RecurrentArch | SideBySideArch
    feed_forward: DenseArch | ExpertsArch
    sliding_window: int = 0
    rope: rotary.Rope | None = None

    def __post_init__(self) -> None:
        if self.rope is None or isinstance(self.attention, RecurrentArch):
            return
        head_dim = self.attention.head_dim
        if not 0 < self.rope.dim <= head_dim or self.rope.dim % 2:
            allowed = f"an even number up to {head_dim}"
            raise BadCheckpoint(f"{self.rope.dim} components of a head cannot rotate: it must be {allowed}")


@dataclass(frozen=True, kw_only=True)
class Arch:
    """An Arch describes a decoder: sizes and layers, then what surrounds their bodies, then factors."""

    vocab_size: int
    hidden_size: int
    embedding_size: int = 0
    """Of the token embeddings and of what the head receives; 0 = hidden_size."""
    layers: tuple[LayerArch, ...]
    num_learned_positions: int = 0
    has_head: bool = True
    """It maps hidden states to logits over the vocabulary."""
    tied_head: bool = False
    head_bias: bool = False
    embeds_last: bool = False
    """The last of several stages has the embeddings, too."""

    residual: Literal["serial", "parallel", "normalised"] = "serial"
    """Attention, then MLP; both from the same stream (without "mlp_in", one norm serves both); or each
    followed by the norm of the stream itself, as in the first transformer."""
    norms: frozenset[Place] = PRE_NORMS
    final_norm: bool = True
    norm: NormArch

    logit_soft_cap: float = 0.0
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Of what attention and MLP add to the stream, where no norm stands behind them; serial layers only."""

    def for_pooling(self, *, is_causal: bool, has_head: bool = False) -> "Arch":
        """Return the same without the head over the vocabulary, unless it is asked for, and the mask."""
        if is_causal:
            return replace(self, has_head=has_head)
        bodies = [layer.attention for layer in self.layers]
        both = [replace(body, is_causal=False) for body in bodies if isinstance(body, HeadsArch)]
        if len(both) < len(bodies):
            raise Unsupported("Only attention of heads sees what comes later; this model has other layers.")
        layers = (replace(layer, attention=body) for layer, body in zip(self.layers, both, strict=True))
        return replace(self, has_head=has_head, layers=tuple(layers))

    @property
    def defers_norms(self) -> bool:
        """Return True if an RMS norm adds each term of serial layers to the stream."""
        return self.norm.kind == "rms" and self.norms >= PRE_NORMS and self.final_norm

    @property
    def defers_products(self) -> bool:
        """Return True if it adds the products of serial layers as they are."""
        return self.defers_norms and self.norms == PRE_NORMS and self.residual_scale == 1.0


def read_arch(config: Config, **own: Any) -> Arch:
    """Read a decoder; `own` as in `arch_fields`."""
    return Arch(**arch_fields(config, **own))


def arch_fields(
    config: Config,
    *,
    attention: HeadsArch | LatentArch | SideBySideArch | None = None,
    feed_forward: DenseArch | ExpertsArch | None = None,
    interleaved_rope: bool = False,
    **own: Any,
) -> dict[str, Any]:
    """Read the fields of an Arch that most configs share; `own` are those that the family adds or replaces.

    attention, feed_forward: of all layers; None = `read_heads`, `read_dense`
    own: may have the rope of all layers, or None; otherwise layers are read by `read_layers`
    Raises BadCheckpoint for a missing or impossible size, Unsupported for an unknown kind of layer or rope.
    """
    common: dict[str, Any] = {
        "vocab_size": size_of(config, "vocab_size"),
        "hidden_size": size_of(config, "hidden_size"),
        "tied_head": bool(config.get("tie_word_embeddings")),
        "norm": NormArch(eps=config.get("rms_norm_eps") or 1e-6),
    }
    bodies = attention or read_heads(config), feed_forward or read_dense(config)
    if "rope" in own:
        layer = LayerArch(attention=bodies[0], feed_forward=bodies[1], rope=own.pop("rope"))
        common["layers"] = (layer,) * size_of(config, "num_hidden_layers")
    else:
        common["layers"] = read_layers(config, *bodies, interleaved_rope)
    return common | own


def read_heads(config: Config, **own: Any) -> HeadsArch:
    """Read sizes and biases of attention; `own` are the fields that the family adds or replaces."""
    hidden_size, num_heads = size_of(config, "hidden_size"), size_of(config, "num_attention_heads")
    if not config.get("head_dim") and hidden_size % num_heads:
        raise BadCheckpoint(f"hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}")
    head_dim = size_of(config, "head_dim", hidden_size // num_heads)
    num_kv_heads = size_of(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise BadCheckpoint(
            f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}"
        )
    bias = bool(config.get("attention_bias"))
    common: Config = {"scale": head_dim**-0.5, "qkv_bias": bias, "out_bias": bias}
    return HeadsArch(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **common | own)


def read_dense(config: Config, **own: Any) -> DenseArch:
    """Read the feed-forward block; `own` are the fields that the family adds or replaces."""
    common: Config = {
        "intermediate_size": size_of(config, "intermediate_size", 4 * size_of(config, "hidden_size")),
        "activation": read_activation(config),
        "bias": bool(config.get("mlp_bias")),
    }
    return DenseArch(**common | own)


def read_activation(config: Config) -> str:
    """Return the activation of feed-forward blocks."""
    return next((config[name] for name in _ACTIVATION_NAMES if config.get(name)), "silu")


def read_norm(config: Config) -> NormArch:
    """Read layer norms with weight and bias."""
    eps = next((config[name] for name in _EPS_NAMES if config.get(name)), 1e-5)
    return NormArch(kind="layer", bias=True, eps=eps)


def read_layers(
    config: Config,
    attention: HeadsArch | LatentArch | SideBySideArch,
    feed_forward: DenseArch | ExpertsArch,
    interleaved: bool = False,
) -> tuple[LayerArch, ...]:
    """Return one entry per layer, by `layer_types` if there are any; otherwise all layers are alike."""
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
            attention=attention,
            feed_forward=feed_forward,
            sliding_window=window if kind == "sliding_attention" else 0,
            rope=read_rope(config, attention.head_dim, kind, interleaved),
        )
        for kind in set(kinds)
    }
    return tuple(made[kind] for kind in kinds)


def read_rope(config: Config, head_dim: int, kind: str = "", interleaved: bool = False) -> rotary.Rope:
    """Read the rope of layers of `kind`: `rope_parameters` (transformers 5), or `rope_scaling` (4)."""
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
    given |= {"max_position_embeddings": longest, "max_model_len": config.get("max_model_len") or longest}
    cls: Any = ROPES[name]
    own = {f.name: given[f.name] for f in fields(cls) if given.get(f.name) is not None}
    try:
        rope: rotary.Rope = cls(**{n: tuple(v) if isinstance(v, list) else v for n, v in own.items()})
    except TypeError as error:
        raise BadCheckpoint(f"Rope {name!r} lacks a parameter: {error}") from error
    return rope


_MAX_SIZE = 1 << 24


def size_of(config: Config, name: str, default: int | None = None) -> int:
    """Return the entry `name` as a positive integer. Raises BadCheckpoint."""
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MAX_SIZE:
        raise BadCheckpoint(
            f"The config's {name} must be a positive integer below {_MAX_SIZE}; found {value!r:.60}"
        )
    return value


def factor_of(config: Config, name: str, default: float = 1.0) -> float:
    """Return the entry `name` as a positive number. Raises BadCheckpoint."""
    value = config.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise BadCheckpoint(f"The config's {name} must be a positive number; found {value!r}")
    return float(value)


def expect(config: Config, **values: Any) -> None:
    """Raise Unsupported if the config has one of these entries with another value."""
    for name, value in values.items():
        if config.get(name) not in (None, value):
            raise Unsupported(f"{name}={config[name]!r} is not supported, only {name}={value!r} is.")
