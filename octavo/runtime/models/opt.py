"""OPT and Galactica learn their positions, and have layer norms before or behind the sums."""

from torch import Tensor

from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.layers.norm import NormArch
from octavo.runtime.models.arch import Arch, Config, LayerArch, read_arch, read_dense, read_heads, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.encoder_decoder import side_weights
from octavo.runtime.models.weights import WeightMap, to

_DEFAULTS: Config = {
    "do_layer_norm_before": True,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
    "activation_function": "relu",
}
_PADDING_POSITIONS = 2


def without_padding(tensor: Tensor, layer: LayerArch | None) -> Tensor:
    """Drop the first rows of the position table, which served padding; position 0 is the row behind them."""
    return tensor[_PADDING_POSITIONS:]


class OPT(Decoder):
    """OPT projects embeddings, where they are smaller than hidden states, by two more matrices."""

    WEIGHTS = WeightMap(
        {
            "decoder.embed_tokens": to("embed_tokens"),
            "decoder.embed_positions": to("embed_positions", "", without_padding),
            "decoder.project_in": to("project_in"),
            "decoder.project_out": to("project_out"),
            "decoder.final_layer_norm": to("norm"),
            "lm_head": to("lm_head"),
            **side_weights("decoder"),
        },
        prefix="model.",
    )

    def __init__(self, arch: Arch, build: BuildContext) -> None:
        super().__init__(arch, build)
        self._projected = arch.embedding_size > 0
        if self._projected:
            sizes = arch.embedding_size, arch.hidden_size
            self.project_in = ReplicatedLinear(build.at("project_in"), *sizes, bias=False)
            self.project_out = ReplicatedLinear(build.at("project_out"), *sizes[::-1], bias=False)

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        config = _DEFAULTS | config | {"intermediate_size": config.get("ffn_dim")}
        bias, weights = bool(config["enable_bias"]), bool(config["layer_norm_elementwise_affine"])
        hidden_size, before = size_of(config, "hidden_size"), bool(config["do_layer_norm_before"])
        embedding_size = size_of(config, "word_embed_proj_dim", hidden_size)
        return read_arch(
            config,
            attention=read_heads(config, qkv_bias=bias, out_bias=bias),
            feed_forward=read_dense(config, gated=False, bias=bias),
            rope=None,
            embedding_size=embedding_size if embedding_size != hidden_size else 0,
            num_learned_positions=size_of(config, "max_position_embeddings"),
            residual="serial" if before else "normalised",
            final_norm=before and not config.get("_remove_final_layer_norm"),
            norm=NormArch(kind="layer", weight=weights, bias=weights, eps=1e-5),
        )

    def embed(self, batch: ForwardBatch) -> Tensor:
        """See Decoder.embed; positions have the size of hidden states."""
        if not self._projected:
            return super().embed(batch)
        tokens: Tensor = self.project_in(batch.with_given_embeds(self.embed_tokens(batch.input_ids)))
        positions: Tensor = self.embed_positions(batch.positions)
        return tokens + positions

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See Model.forward; hidden states have the size of embeddings."""
        hidden = super().forward(batch)
        return self.project_out(hidden) if self._projected and self.has_logits else hidden
