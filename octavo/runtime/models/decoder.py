"""A `Decoder` is the transformer that most families are, put together as an `Arch` says.

A family's file subclasses it with `arch_from_hf` and a weight map, and overrides a part only
where it differs in kind. Our parameter names, which weight maps refer to:

    embed_tokens  embed_positions  norm  lm_head
    layers.*.attention_norm  .attention.{qkv, q_norm, k_norm, out}  .attention_out_norm
    layers.*.attention.{q_a, q_norm, q, kv_a, kv_norm, heads, out}, of latent attention
    layers.*.attention.{project, conv, conv_bias, rate, step_bias, skip, norm, out}, of recurrent layers
    layers.*.attention.{heads, recurrent}, of layers with both, each with parts as above
    layers.*.mlp_norm  .mlp.{up, down}  .mlp_out_norm
    layers.*.mlp.{router, choice, experts, shared.{up, down}, shared_gate}, of experts
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext, packed_matrices
from octavo.runtime.layers.embedding import Choice, Embedding, Find, LMHead, VocabEmbedding
from octavo.runtime.layers.experts import Experts, ExpertsArch
from octavo.runtime.layers.latent_attention import LatentArch, LatentAttention
from octavo.runtime.layers.mlp import MLP, DenseArch
from octavo.runtime.layers.norm import NoNorm, Norm, Term, make_norm
from octavo.runtime.layers.recurrent import Recurrent, RecurrentArch
from octavo.runtime.layers.rotary import Rope, RotaryEmbedding
from octavo.runtime.layers.rows import make_row_gather
from octavo.runtime.layers.self_attention import AttentionSetting, HeadsArch, SelfAttention
from octavo.runtime.layers.side_by_side import SideBySide, SideBySideArch
from octavo.runtime.models.arch import RESIDUAL_NORMS, Arch, Config, Place, read_arch
from octavo.runtime.models.interface import Family
from octavo.runtime.models.weights import WeightMap, layer_of, qkv, to

ATTENTIONS = {HeadsArch: SelfAttention, LatentArch: LatentAttention, SideBySideArch: SideBySide}
FEED_FORWARDS = {DenseArch: MLP, ExpertsArch: Experts}
"""The bodies of layers, by what describes them."""


class Want(NamedTuple):
    """What a layer is to return; the cache gets the keys and values of all tokens.

    rows: of the result, [S] int64; None = all. inputs: where these rows of the layer's input are kept
    """

    rows: Tensor | None = None
    inputs: list[Tensor] | None = None


ALL = Want()
Stream = tuple[Term, Tensor | None]
"""A term, and the residual stream that it is to be added to."""


class DecoderLayer(nn.Module):
    """Computes attention, then the MLP, each between the norms that the architecture has."""

    def __init__(
        self, arch: Arch, build: BuildContext, layer_id: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        layer, size = arch.layers[layer_id], arch.hidden_size

        def norm(place: Place, name: str) -> Norm:
            if place in arch.norms:
                defers = arch.defers_norms and place in RESIDUAL_NORMS
                return make_norm(arch.norm, build.at(name), size, defers=defers)
            return NoNorm(arch.residual_scale if place in RESIDUAL_NORMS else 1.0)

        self.attention_norm = norm("attention_in", "attention_norm")
        body, place = layer.attention, build.at("attention")
        cache_id = layer_id - build.parallel.first_layer
        self.attention: SelfAttention | LatentAttention | Recurrent | SideBySide
        if isinstance(body, RecurrentArch):
            self.attention = Recurrent(body, place, cache_id, size, arch.norm.eps)
        else:
            setting = AttentionSetting(arch.norm, rotary, layer.sliding_window)
            self.attention = ATTENTIONS[type(body)](body, place, cache_id, size, setting)
        self.attention_out_norm = norm("attention_out", "attention_out_norm")
        self.mlp_norm = norm("mlp_in", "mlp_norm")
        self.mlp = FEED_FORWARDS[type(layer.feed_forward)](layer.feed_forward, build.at("mlp"), size)
        self.mlp_out_norm = norm("mlp_out", "mlp_out_norm")
        self._defers_products = arch.defers_products
        self._gather = make_row_gather(build)

    def forward(self, x: Term, residual: Tensor | None, batch: ForwardBatch, want: Want = ALL) -> Stream:
        """Take and return a term and the stream that it is to be added to, so that norms can add."""
        x, residual = self._begin(x, residual, want)
        if self._defers_products:
            x, residual = self.mlp_norm.add(self.attention.defer(x, batch, want.rows), residual)
            return self.mlp.defer(x), residual
        term = self.attention_out_norm.defer(self.attention(x, batch, want.rows))
        x, residual = self.mlp_norm.add(term, residual)
        return self.mlp_out_norm.defer(self.mlp(x)), residual

    def _begin(self, x: Term, residual: Tensor | None, want: Want) -> tuple[Tensor, Tensor]:
        """Add what comes to the stream; return its norm, and the rows of it that are wanted."""
        x, residual = self.attention_norm.add(x, residual)
        residual = self._gather(residual, want.rows)
        if want.inputs is not None:
            want.inputs.append(residual)
        return x, residual


class ParallelLayer(DecoderLayer):
    """Computes attention and MLP side by side, each with a norm of its own or both with one."""

    def forward(self, x: Term, residual: Tensor | None, batch: ForwardBatch, want: Want = ALL) -> Stream:
        x, residual = self._begin(x, residual, want)
        one_norm = isinstance(self.mlp_norm, NoNorm)
        mlp_input = self._gather(x, want.rows) if one_norm else self.mlp_norm(residual)
        return self.attention(x, batch, want.rows) + self.mlp(mlp_input), residual


class NormalisedLayer(DecoderLayer):
    """Normalises the sums: the norms' outputs are the residual stream."""

    def forward(self, x: Term, residual: Tensor | None, batch: ForwardBatch, want: Want = ALL) -> Stream:
        """See DecoderLayer; `residual` stays None."""
        assert residual is None and isinstance(x, Tensor)
        own = self._gather(x, want.rows)
        if want.inputs is not None:
            want.inputs.append(own)
        x = self.attention_norm.of_sum(self.attention(x, batch, want.rows), own)
        return self.mlp_norm.of_sum(self.mlp(x), x), None


LAYERS = {"serial": DecoderLayer, "parallel": ParallelLayer, "normalised": NormalisedLayer}


class Decoder(Family):
    """Runs embedding, layers and norm; the head apart, because only some rows need it."""

    WEIGHTS = WeightMap(
        {
            "embed_tokens": to("embed_tokens"),
            "norm": to("norm"),
            "lm_head": to("lm_head"),
            "layers.*.input_layernorm": to("layers.*.attention_norm"),
            **qkv("layers.*.self_attn.?_proj", "layers.*.attention.qkv"),
            "layers.*.self_attn.q_norm": to("layers.*.attention.q_norm"),
            "layers.*.self_attn.k_norm": to("layers.*.attention.k_norm"),
            "layers.*.self_attn.o_proj": to("layers.*.attention.out"),
            "layers.*.post_attention_layernorm": to("layers.*.mlp_norm"),
            "layers.*.mlp.gate_proj": to("layers.*.mlp.up", "gate"),
            "layers.*.mlp.up_proj": to("layers.*.mlp.up", "up"),
            "layers.*.mlp.down_proj": to("layers.*.mlp.down"),
        },
        prefix="model.",
        ignored=(r"rotary_emb\.inv_freq$",),
    )
    """The names in most checkpoints."""
    LAYERS: ClassVar[Mapping[str, type[DecoderLayer]]] = LAYERS
    GGUF_WEIGHTS = WeightMap(
        {
            "token_embd": to("embed_tokens"),
            "position_embd": to("embed_positions"),
            "output_norm": to("norm"),
            "output": to("lm_head"),
            "blk.*.attn_norm": to("layers.*.attention_norm"),
            "blk.*.attn_qkv": to("layers.*.attention.qkv"),
            **qkv("blk.*.attn_?", "layers.*.attention.qkv"),
            "blk.*.attn_q_norm": to("layers.*.attention.q_norm"),
            "blk.*.attn_k_norm": to("layers.*.attention.k_norm"),
            "blk.*.attn_output": to("layers.*.attention.out"),
            "blk.*.post_attention_norm": to("layers.*.attention_out_norm"),
            "blk.*.ffn_norm": to("layers.*.mlp_norm"),
            "blk.*.ffn_gate": to("layers.*.mlp.up", "gate"),
            "blk.*.ffn_up": to("layers.*.mlp.up", "up"),
            "blk.*.ffn_down": to("layers.*.mlp.down"),
            "blk.*.post_ffw_norm": to("layers.*.mlp_out_norm"),
            "blk.*.ffn_gate_inp": to("layers.*.mlp.router"),
            "blk.*.ffn_gate_exps": to("layers.*.mlp.experts.up", "gate"),
            "blk.*.ffn_up_exps": to("layers.*.mlp.experts.up", "up"),
            "blk.*.ffn_down_exps": to("layers.*.mlp.experts.down"),
        },
        ignored=(r"^rope_(freqs|factors_long|factors_short)\.weight$",),  # read with the config
    )

    taps: tuple[int, ...] = ()
    """Layers whose inputs stand, side by side, behind the last hidden states; for who guesses from them."""

    def __init__(self, arch: Arch, build: BuildContext) -> None:
        super().__init__(arch, build)
        embedding_size = arch.embedding_size or arch.hidden_size
        self._pipeline, self.own_layers = build.parallel.pp, build.parallel.layers
        self._stage: Sequence[int] = self.own_layers or range(len(arch.layers))
        self._arch_of_layer = arch.layers
        self._size, self._dtype = arch.hidden_size, build.compute_dtype
        is_first, self.has_logits = self._pipeline.is_first, self._pipeline.is_last
        embeds = is_first or (self.has_logits and arch.embeds_last)
        if embeds or (self.has_logits and arch.tied_head):
            self.embed_tokens = VocabEmbedding(build.at("embed_tokens"), arch.vocab_size, embedding_size)
        if arch.num_learned_positions and embeds:
            self.embed_positions = Embedding(
                build.at("embed_positions"), arch.num_learned_positions, arch.hidden_size
            )
        ropes: dict[Rope, RotaryEmbedding] = {
            layer.rope: RotaryEmbedding(layer.rope, build.device, build.kernels.attention)
            for layer in arch.layers
            if layer.rope
        }
        layer_type = self.LAYERS[arch.residual]
        self.layers = nn.ModuleList(
            layer_type(arch, build.at(f"layers.{i}"), i, ropes[layer.rope] if layer.rope else None)
            if i in self._stage
            else nn.Identity()
            for i, layer in enumerate(arch.layers)
        )
        self.norm = make_norm(arch.norm, build.at("norm"), arch.hidden_size) if arch.final_norm else NoNorm()
        if arch.has_head and self.has_logits:
            self.lm_head = LMHead(
                build.at("lm_head"),
                arch.vocab_size,
                embedding_size,
                tied=self.embed_tokens if arch.tied_head else None,
                bias=arch.head_bias,
                scale=arch.logit_scale,
                soft_cap=arch.logit_soft_cap,
            )
        self._learned_positions = arch.num_learned_positions > 0
        # Rounded to the type of the activations, as these models were trained.
        self._embedding_scale = torch.tensor(arch.embedding_scale, dtype=build.compute_dtype).item()
        self._attention = build.attention
        self._gather, self._join = make_row_gather(build), build.kernels.linear.join

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """See Family.arch_from_hf: what most configs share is all there is."""
        return read_arch(config)

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Return the input of the first layer."""
        x: Tensor = self.embed_tokens(batch.input_ids, self._embedding_scale)
        x = batch.with_given_embeds(x)
        if self._learned_positions:
            x = x + self.embed_positions(batch.positions)
        return x

    def forward(self, batch: ForwardBatch) -> Tensor:
        self._attention.plan(batch)
        (x, *inputs), residual, last = self._enter(batch), None, len(self.layers) - 1
        for index in self._stage:
            kept = inputs if index in self.taps else None
            want = Want(batch.wanted if index == last else None, kept)
            x, residual = self.layers[index](x, residual, batch, want)
            if batch.deep_embeds is not None and residual is not None:
                residual = batch.deep_embeds.add_part(index, residual)
        hidden, stream = self.norm.add(x, residual)
        found = hidden if self.has_logits else stream
        if inputs:
            width = len(found)
            parts = (part if len(part) == width else self._gather(part, batch.wanted) for part in inputs)
            found = self._join(found, *parts)
        if not self.has_logits and batch.entered is None:
            self._pipeline.send(found)
        return found

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """See Model. The first layer and the last launch other kernels than their like."""
        whole, archs = self._stage, self._arch_of_layer
        kinds = {repr((archs[i], packed_matrices(self.layers[i]))): i for i in whole[1:-1]}
        if not self.host_weight_bytes:  # else layers bring each other's weights
            taps = set(self.taps).intersection(whole)
            self._stage = sorted({whole[0], *kinds.values(), *taps, whole[-1]})
        try:
            yield
        finally:
            self._stage = whole

    @property
    def boundary(self) -> tuple[int, int, torch.dtype] | None:
        """See Model: the residual stream, and the inputs of layers before that somebody guesses from."""
        if (own := self.own_layers) is None:
            return None
        begin, end = (1 + sum(layer < bound for layer in self.taps) for bound in (own.start, own.stop))
        return begin * self._size, end * self._size, self._dtype

    def _enter(self, batch: ForwardBatch) -> list[Tensor]:
        """Return the residual stream where this stage begins, and the inputs of layers that came with it."""
        if self._pipeline.is_first:
            return [self.embed(batch)]
        if (came := batch.entered) is None:
            assert self.boundary is not None
            shape = len(batch.input_ids), self.boundary[0]
            came = self._pipeline.receive(shape, self._dtype, batch.input_ids.device)
        return [part.contiguous() for part in torch.split(came, self._size, dim=1)]

    def is_elsewhere(self, parameter: str) -> bool:
        """See Family: other stages have other layers, the first the embeddings and the last the head."""
        if self.own_layers is None:
            return False
        module, layer = parameter.partition(".")[0], layer_of(parameter)
        if layer is not None:
            return layer < len(self.layers) and layer not in self.own_layers
        return module in ("embed_tokens", "embed_positions", "lm_head") and not hasattr(self, module)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self._own(hidden))
        return logits

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.lm_head.greedy(self._own(hidden))

    def draw(self, hidden: Tensor, find: Find, *, is_cut: bool = False) -> Choice | None:
        return self.lm_head.draw(self._own(hidden), find, is_cut=is_cut)

    def _own(self, hidden: Tensor) -> Tensor:
        """Return the last hidden states without what stands behind them."""
        return hidden[:, : self._size].contiguous() if self.taps else hidden
