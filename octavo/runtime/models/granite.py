"""Granite 3 is a Llama with constant factors on embeddings, attention scores, residuals and logits.

GraniteMoE is a Granite with experts; its variant with shared experts is another architecture.
"""

from dataclasses import replace

from torch import Tensor

from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.mlp import DenseArch
from octavo.runtime.models import experts
from octavo.runtime.models.arch import Arch, Config, factor_of, read_arch, read_dense, read_heads, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.experts import part_gates
from octavo.runtime.models.recurrent import read_mamba2, scan_weights, with_recurrent_layers
from octavo.runtime.models.weights import to


class Granite(Decoder):
    """Granite multiplies given embeddings, too: they stand for what the table holds."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read the factors: each is 1 unless the config says otherwise, that on the scores as well."""
        return read_arch(
            config,
            attention=read_heads(config, scale=factor_of(config, "attention_multiplier")),
            embedding_scale=factor_of(config, "embedding_multiplier"),
            residual_scale=factor_of(config, "residual_multiplier"),
            logit_scale=1 / factor_of(config, "logits_scaling"),
        )

    def embed(self, batch: ForwardBatch) -> Tensor:
        return batch.with_given_embeds(self.embed_tokens(batch.input_ids)) * self._embedding_scale


class GraniteMoE(Granite):
    """Granite's factors, and experts in every layer."""

    WEIGHTS = Granite.WEIGHTS.replace(
        experts.routed("layers.*.block_sparse_moe")
        | {
            "layers.*.block_sparse_moe.input_linear": to("layers.*.mlp.experts.up", "", part_gates),
            "layers.*.block_sparse_moe.output_linear": to("layers.*.mlp.experts.down"),
            "layers.*.block_sparse_moe.router": to("layers.*.mlp.router"),
            "layers.*.block_sparse_moe.router.layer": to("layers.*.mlp.router"),
            "layers.*.shared_mlp.input_linear": to("layers.*.mlp.shared.up"),
            "layers.*.shared_mlp.output_linear": to("layers.*.mlp.shared.down"),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Add the experts, and what all tokens share if there is that."""
        arch, size = Granite.arch_from_hf(config), config.get("shared_intermediate_size")
        shared = (
            read_dense(config, intermediate_size=size_of(config, "shared_intermediate_size"))
            if size
            else None
        )
        feed_forward = experts.read_experts(config, experts.granite(config), shared=shared)
        layers = tuple(replace(layer, feed_forward=feed_forward) for layer in arch.layers)
        return replace(arch, layers=layers)


class GraniteHybrid(GraniteMoE):
    """Granite 4: Mamba-2 in most layers; experts beside the dense block, or that alone."""

    WEIGHTS = GraniteMoE.WEIGHTS.replace(scan_weights("layers.*.mamba"))

    def __init__(self, arch: Arch, build: BuildContext) -> None:
        super().__init__(arch, build)
        if isinstance(arch.layers[0].feed_forward, DenseArch):
            parts = {"input_linear": to("layers.*.mlp.up"), "output_linear": to("layers.*.mlp.down")}
            self.WEIGHTS = self.WEIGHTS.replace({f"layers.*.shared_mlp.{x}": y for x, y in parts.items()})

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read which layers have attention, which rotates only where the config says so."""
        alike = {**config, "layer_types": None}
        if config.get("num_local_experts"):
            arch = GraniteMoE.arch_from_hf(alike)
        else:
            size = size_of(config, "shared_intermediate_size", 1024)
            arch = Granite.arch_from_hf({**alike, "intermediate_size": size})
        if config.get("position_embedding_type") != "rope":
            arch = replace(arch, layers=tuple(replace(layer, rope=None) for layer in arch.layers))
        return with_recurrent_layers(config, arch, read_mamba2(config))
