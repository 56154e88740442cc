"""Layers that guess from a model's hidden states: EAGLE-1, EAGLE-3, and the layers of MTP in checkpoints.

A token is guessed from the state of the token before the last, as the model left it, and from the embedding
of the last. So each entry stands at the place of its state, and its id is the next one. Used by
runtime/speculative.
Sources: https://arxiv.org/abs/2401.15077, https://arxiv.org/abs/2503.01840, https://arxiv.org/abs/2412.19437
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo.base.errors import Unsupported
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.embedding import LMHead, VocabEmbedding
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.layers.mlp import MLP, DenseArch
from octavo.runtime.layers.norm import Term, make_norm
from octavo.runtime.layers.recurrent import RecurrentArch
from octavo.runtime.layers.rotary import Rope, RotaryEmbedding
from octavo.runtime.layers.rows import make_row_gather
from octavo.runtime.layers.self_attention import AttentionSetting, HeadsArch, SelfAttention
from octavo.runtime.models.arch import Arch, Config, read_arch, read_heads, size_of
from octavo.runtime.models.decoder import Decoder, DecoderLayer
from octavo.runtime.models.interface import Family
from octavo.runtime.models.weights import Target, WeightMap, to

OWN_PARTS = ("embed_tokens", "lm_head", "q_norm")
"""Of which a config's entry `has_{name}`, put there by who has looked, says that the checkpoint has them."""


@dataclass(frozen=True, kw_only=True)
class DraftArch(Arch):
    """A DraftArch describes layers that guess from hidden states.

    state_size:  of the model's states; num_states: of its layers that are read, 0 = the last norm's
    """

    state_size: int
    num_states: int = 0
    fc_bias: bool = False
    has_embeddings: bool = False
    draft_vocab_size: int = 0
    """Of its own head."""
    norms_before_residual: bool = False
    norms_states: bool = False
    """Each of them by a norm of its own; or `norms_joined`, all as one vector."""
    norms_joined: bool = False
    gives_normed: bool = False
    """The next guess is made from the normed state."""
    mask_id: int = 0
    block_size: int = 1
    """Of heads that guess by masks: tokens that they were trained to see at once, 1 = not known."""


def as_draft(arch: Arch, **own: Any) -> DraftArch:
    """Return the same layers as a draft's."""
    common = {field.name: getattr(arch, field.name) for field in fields(Arch)}
    return DraftArch(**common | {"state_size": arch.hidden_size} | own)


class DraftHead(Family):
    """A DraftHead turns states and embeddings into states from which tokens are guessed."""

    @staticmethod
    def taps(config: Config, num_layers: int = 0) -> tuple[int, ...]:
        """Return the layers of the model, of which there are `num_layers`, whose inputs are read.

        None where what the last norm gives is read.
        """
        return ()

    def __init__(self, arch: DraftArch, build: BuildContext) -> None:
        """Make what all kinds have. The model's own parts are known once it is attached."""
        super().__init__(arch, build)
        self._arch, self._build, self._join = arch, build, build.kernels.linear.join
        self._attention, self._gather = build.attention, make_row_gather(build)
        self._given: Tensor | None = None
        self.leaves_states = False
        """Replays leave in `states` what they find: the next ones begin with that."""
        self.target_ids: Tensor | None = None
        self._target: tuple[Decoder, ...] = ()
        ropes = {layer.rope for layer in arch.layers if layer.rope}
        self._rotary: dict[Rope, RotaryEmbedding] = {
            rope: RotaryEmbedding(rope, build.device, build.kernels.attention) for rope in ropes
        }
        if arch.has_embeddings:
            self.embed_tokens = VocabEmbedding(build.at("embed_tokens"), arch.vocab_size, arch.hidden_size)
        if arch.has_head:
            self.lm_head = LMHead(build.at("lm_head"), arch.draft_vocab_size, arch.hidden_size)

    def attach(self, target: Decoder, num_rows: int, target_ids: Tensor | None) -> None:
        """Share the embeddings and the head of `target`, which is not counted as a part.

        num_rows: the most that a replayed step has; target_ids: of the own vocabulary's tokens, [size] int64
        """
        self._target = (target,)
        device, dtype = self._build.device, self._build.compute_dtype
        self.states = torch.zeros((num_rows, self._arch.hidden_size), dtype=dtype, device=device)
        self.target_ids = None if target_ids is None else target_ids.to(device)

    def put(self, states: Tensor, *, stays: bool) -> None:
        """Take the states of the next batch, [T, hidden_size]. stays: copy them to where replays find them"""
        self._given = None if stays else states
        if stays:
            self.states[: len(states)] = states

    def go_on(self, rows: Tensor) -> None:
        """Put what replays left in these rows of `states` into the first ones, for the next replay."""
        self.states[: len(rows)] = self.states[rows]

    def combine(self, hidden: Tensor) -> Tensor:
        """Make states [T, hidden_size] of what the model gives, [T, width]."""
        return hidden

    @abstractmethod
    def run(self, embeds: Tensor, states: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the states from which tokens are guessed."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        self._attention.plan(batch)
        embeds = (
            self.embed_tokens(batch.input_ids) if self._arch.has_embeddings else self._target[0].embed(batch)
        )
        states, count = self._given, len(batch.input_ids)
        is_replayed = states is None or len(states) != count  # or recorded for that
        if states is None or is_replayed:
            states = self.states[:count]
        found = self.run(embeds, states, batch)
        if is_replayed and self.leaves_states:
            states.copy_(found)
        return self._gather(found, batch.wanted)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the own vocabulary, of which `target_ids` tells if it is not the model's."""
        found: Tensor = (self.lm_head if self._arch.has_head else self._target[0].lm_head)(hidden)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        found = self.own_logits(hidden)
        if self.target_ids is None:
            return found
        return found.new_full((len(found), self._arch.vocab_size), -torch.inf).index_copy(
            1, self.target_ids, found
        )

    def _layer(self, arch: Arch, build: BuildContext, index: int) -> DecoderLayer:
        rope = arch.layers[index].rope
        return DecoderLayer(arch, build.at(f"layers.{index}"), index, self._rotary[rope] if rope else None)


def _layer_zero(rules: Mapping[str, Target], prefix: str) -> dict[str, Target]:
    """Return the rules of layers for the only one, whose names begin with `prefix`."""
    return {
        stem.replace("layers.*.", prefix): target._replace(module=target.module.replace("*", "0"))
        for stem, target in rules.items()
        if stem.startswith("layers.*.")
    }


class Eagle(DraftHead):
    """EAGLE-1: a layer of the model's kind over the projected pair, without its first norm."""

    WEIGHTS = WeightMap(
        {
            **Decoder.WEIGHTS.rules,
            **_layer_zero(Decoder.WEIGHTS.rules, "transformer."),
            "fc": to("fc"),
            "fusion_fc": to("fc"),
        },
        prefix="model.",
        ignored=(
            *Decoder.WEIGHTS.ignored,
            r"^(model\.)?embed_tokens\.",
            r"^lm_head\.",
            r"(layers\.0|^transformer)\.input_layernorm",
        ),
    )

    @staticmethod
    def arch_from_hf(config: Config) -> DraftArch:
        """Read a config in the form of a Llama's; head and embeddings are always the model's."""
        if config.get("add_para_norm") or config.get("layernorms"):
            raise Unsupported("EAGLE-1 heads with norms of their inputs are not supported.")
        own = {"fc_bias": bool(config.get("fusion_bias", config.get("bias"))), "has_head": False}
        return as_draft(read_arch(config, final_norm=False), **own)

    def __init__(self, arch: DraftArch, build: BuildContext) -> None:
        super().__init__(arch, build)
        self.fc = ReplicatedLinear(build.at("fc"), 2 * arch.hidden_size, arch.hidden_size, arch.fc_bias)
        first = replace(arch, norms=arch.norms - {"attention_in"})
        self.layers = nn.ModuleList(
            self._layer(arch if index else first, build, index) for index in range(len(arch.layers))
        )

    def run(self, embeds: Tensor, states: Tensor, batch: ForwardBatch) -> Tensor:
        x, residual = self.fc(self._join(embeds, states)), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        total: Tensor = x + residual
        return total


class Eagle3Layer(nn.Module):
    """The first layer of EAGLE-3 attends by normed embeddings and states, side by side."""

    def __init__(self, arch: DraftArch, build: BuildContext, rotary: RotaryEmbedding | None) -> None:
        super().__init__()
        layer, size = arch.layers[0], arch.hidden_size
        assert isinstance(layer.attention, HeadsArch) and isinstance(layer.feed_forward, DenseArch)
        names = ("attention_norm", "hidden_norm", "mlp_norm")
        self.attention_norm, self.hidden_norm, self.mlp_norm = (
            make_norm(arch.norm, build.at(name), size) for name in names
        )
        setting = AttentionSetting(arch.norm, rotary, layer.sliding_window, input_size=2 * size)
        self.attention = SelfAttention(layer.attention, build.at("attention"), 0, size, setting)
        self.mlp = MLP(layer.feed_forward, build.at("mlp"), size)
        self._join, self._norms_first = build.kernels.linear.join, arch.norms_before_residual

    def forward(self, embeds: Tensor, states: Tensor, batch: ForwardBatch) -> tuple[Term, Tensor | None]:
        """Return (a term, the residual stream that it is to be added to)."""
        normed = self.hidden_norm(states)
        x = self.attention(self._join(self.attention_norm(embeds), normed), batch)
        x, residual = self.mlp_norm.add(x, normed if self._norms_first else states)
        return self.mlp(x), residual


_EAGLE3_RULES = {**Decoder.WEIGHTS.rules, "layers.*.hidden_norm": to("layers.*.hidden_norm")}


class Eagle3(DraftHead):
    """EAGLE-3: a layer over states of several layers of the model, with a head of its own vocabulary."""

    WEIGHTS = WeightMap(
        {
            **_EAGLE3_RULES,
            **_layer_zero(_EAGLE3_RULES, "midlayer."),
            "fc": to("fc"),
            "fc_norm.*": to("fc_norm.*"),
            "input_norm": to("input_norm"),
        },
        prefix="model.",
        ignored=(*Decoder.WEIGHTS.ignored, r"^(model\.)?(d2t|t2d)$"),
    )

    @staticmethod
    def taps(config: Config, num_layers: int = 0) -> tuple[int, ...]:
        nested: Config = config.get("eagle_config") or {}
        name = "eagle_aux_hidden_state_layer_ids"
        if not nested.get("use_aux_hidden_state", True):
            return ()
        given = nested.get(name) or config.get(name)
        return tuple(given) if given else (2, num_layers // 2, num_layers - 3)

    @staticmethod
    def arch_from_hf(config: Config) -> DraftArch:
        """Read a config of the first release, of NVIDIA's, or of the speculators format, flattened."""
        nested: Config = config.get("eagle_config") or {}
        own: Config = {
            "draft_vocab_size": size_of(config, "draft_vocab_size", size_of(config, "vocab_size")),
            "num_states": len(Eagle3.taps(config)),
            "state_size": size_of(config, "target_hidden_size", size_of(config, "hidden_size")),
            "has_embeddings": bool(config.get("has_embed_tokens")),
            "has_head": bool(config.get("has_lm_head")),
            "norms_before_residual": bool(config.get("norm_before_residual")),
            "norms_states": bool(config.get("fc_norm")),
            "norms_joined": bool(nested.get("norm_before_fc", config.get("norm_before_fc"))),
            "gives_normed": bool(config.get("norm_output")),
        }
        heads = read_heads(config, qk_norm="head" if config.get("has_q_norm") else "none")
        return as_draft(read_arch(config, attention=heads), **own)

    def __init__(self, arch: DraftArch, build: BuildContext) -> None:
        super().__init__(arch, build)
        size, width = arch.hidden_size, arch.state_size * arch.num_states
        if arch.num_states:
            self.fc = ReplicatedLinear(build.at("fc"), width, size, bias=False)
        if arch.norms_joined:
            self.input_norm = make_norm(arch.norm, build.at("input_norm"), width)
        if arch.norms_states:
            self.fc_norm = nn.ModuleList(
                make_norm(arch.norm, build.at(f"fc_norm.{i}"), arch.state_size)
                for i in range(arch.num_states)
            )
        rope = arch.layers[0].rope
        first = Eagle3Layer(arch, build.at("layers.0"), self._rotary[rope] if rope else None)
        others = (self._layer(arch, build, index) for index in range(1, len(arch.layers)))
        self.layers = nn.ModuleList([first, *others])
        self.norm = make_norm(arch.norm, build.at("norm"), size)

    def combine(self, hidden: Tensor) -> Tensor:
        """Project the states of the layers that are read, which stand behind the last one."""
        arch = self._arch
        if not arch.num_states:
            return hidden
        x = hidden[:, -arch.num_states * arch.state_size :]
        if arch.norms_joined:
            x = self.input_norm(x)
        if arch.norms_states:
            parts = torch.split(x, arch.state_size, dim=1)
            x = self._join(*(norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)))
        states: Tensor = self.fc(x)
        return states

    def run(self, embeds: Tensor, states: Tensor, batch: ForwardBatch) -> Tensor:
        x, residual = self.layers[0](embeds, states, batch)
        for layer in self.layers[1:]:
            x, residual = layer(x, residual, batch)
        normed, stream = self.norm.add(x, residual)
        return normed if self._arch.gives_normed else stream

    def own_logits(self, hidden: Tensor) -> Tensor:
        return super().own_logits(hidden if self._arch.gives_normed else self.norm(hidden))


class MTP(DraftHead):
    """A layer of multi-token prediction, of the kind of the model's last ones. See `mtp_of`."""

    FAMILY: ClassVar[type[Family]]

    @classmethod
    def arch_from_hf(cls, config: Config) -> DraftArch:
        """Take the last layer with attention; embeddings and head are the model's."""
        arch = cls.FAMILY.arch_from_hf(config)
        layer = next(x for x in reversed(arch.layers) if not isinstance(x.attention, RecurrentArch))
        return as_draft(replace(arch, layers=(layer,)), has_head=False)

    def __init__(self, arch: DraftArch, build: BuildContext) -> None:
        super().__init__(arch, build)
        size = arch.hidden_size
        names = ("embeds_norm", "states_norm", "norm")
        self.embeds_norm, self.states_norm, self.norm = (
            make_norm(arch.norm, build.at(name), size) for name in names
        )
        self.fc = ReplicatedLinear(build.at("fc"), 2 * size, size, bias=False)
        self.layers = nn.ModuleList([self._layer(arch, build, 0)])

    def run(self, embeds: Tensor, states: Tensor, batch: ForwardBatch) -> Tensor:
        x = self.fc(self._join(self.embeds_norm(embeds), self.states_norm(states)))
        return self.norm.add(*self.layers[0](x, None, batch))[0]


@dataclass(frozen=True)
class _LayerOf(WeightMap):
    """Finds the tensors whose names begin with `start`, as if that were `place`; leaves out the others."""

    start: str = ""
    place: str = ""

    def find(self, name: str) -> Target | None:
        return super().find(self.place + name.removeprefix(self.start))

    def sources(self, module: str) -> dict[str, str]:
        found, place = super().sources(module), f"model.{self.place}"
        return {shard: self.start + name.removeprefix(place) for shard, name in found.items()}

    def ignores(self, name: str) -> bool:
        return not name.startswith(self.start) or super().ignores(name)


_BEHIND = {"enorm": "embeds_norm", "hnorm": "states_norm", "eh_proj": "fc", "shared_head.norm": "norm"}


def mtp_of(family: type[Family], config: Config) -> type[MTP]:
    """Return the family of the first layer of MTP in a checkpoint of `family`.

    It stands behind the other layers, or under a name of its own. Raises Unsupported where there is none.
    """
    ignored = (*Decoder.WEIGHTS.ignored, r"\.shared_head\.head\.", r"\.embed_tokens\.")
    if names := family.MTP_NAMES:
        start, place = "mtp.", ""
    elif family.has_spare_layers:
        names = {f"layers.*.{name}": to(ours) for name, ours in _BEHIND.items()}
        start, place = f"model.layers.{size_of(config, 'num_hidden_layers')}.", "layers.0."
        ignored = (*family.WEIGHTS.ignored, *ignored)
    else:
        raise Unsupported(f"method='mtp': octavo knows no layers of MTP of {family.__name__}.")
    weights = _LayerOf({**family.WEIGHTS.rules, **names}, "model.", ignored, start=start, place=place)
    return type(f"{family.__name__}MTP", (MTP,), {"WEIGHTS": weights, "FAMILY": family})
