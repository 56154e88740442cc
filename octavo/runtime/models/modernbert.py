"""ModernBERT sees a window in most layers, rotates by two thetas, and has gates and few biases."""

from collections.abc import Mapping
from typing import ClassVar

from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.norm import NoNorm, NormArch
from octavo.runtime.layers.pooler import ClassifierArch
from octavo.runtime.models.arch import Arch, Config, arch_fields, expect, size_of
from octavo.runtime.models.encoder import Encoder, EncoderArch
from octavo.runtime.models.weights import Target, WeightMap, to


class ModernBert(Encoder):
    """The first layer has no norm before attention: the embeddings' norm is that."""

    WEIGHTS = WeightMap(
        {
            "embeddings.tok_embeddings": to("embed_tokens"),
            "embeddings.norm": to("embed_norm"),
            "layers.*.attn_norm": to("layers.*.attention_norm"),
            "layers.*.attn.Wqkv": to("layers.*.attention.qkv"),
            "layers.*.attn.Wo": to("layers.*.attention.out"),
            "layers.*.mlp_norm": to("layers.*.mlp_norm"),
            "layers.*.mlp.Wi": to("layers.*.mlp.up"),
            "layers.*.mlp.Wo": to("layers.*.mlp.down"),
            "final_norm": to("norm"),
        },
        prefix="model.",
        ignored=(r"^head\.(dense|norm)", r"^decoder\.bias", r"^decoder\.weight"),
    )
    MASKED_HEAD: ClassVar[Mapping[str, Target]] = {
        "head.dense": to("head_dense"),
        "head.norm": to("head_norm"),
        "decoder.bias": to("lm_head.bias"),
    }
    CLASSIFIER = ClassifierArch(
        dense="head.dense",
        dense_bias=False,
        activation="GELU",
        norm="head.norm",
        out="classifier",
        out_bias=True,
        per_token=True,
    )

    def __init__(self, arch: Arch, build: BuildContext) -> None:
        super().__init__(arch, build)
        self.layers[0].attention_norm = NoNorm()

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read both spellings of windows and thetas."""
        expect(config, norm_bias=False, classifier_bias=False, classifier_activation="gelu")
        count = size_of(config, "num_hidden_layers")
        every = size_of(config, "global_attn_every_n_layers", 3)
        kinds = ["sliding_attention" if i % every else "full_attention" for i in range(count)]
        thetas = {
            "full_attention": {"rope_theta": config.get("global_rope_theta") or 160000.0},
            "sliding_attention": {"rope_theta": config.get("local_rope_theta") or 10000.0},
        }
        usual: Config = {"layer_types": kinds, "rope_parameters": thetas, "hidden_activation": "gelu"}
        config = usual | config
        # As many tokens on either side as half of the window that is told, and the token itself.
        config |= {"sliding_window": size_of(config, "local_attention", 128) // 2 + 1}
        norm = NormArch(kind="layer", eps=config.get("norm_eps") or 1e-5)
        return EncoderArch(**arch_fields(config, norm=norm, tied_head=True), head_dense_bias=False)
