"""CLIP and SigLIP put texts and pictures into one space: a tower for each, and a projection behind it.

The state of a text's last token becomes its vector. A picture is a prompt of one token, whose state is
replaced by the vector that its tower made (https://arxiv.org/abs/2103.00020, 2303.15343).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.embedding import Embedding
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.layers.norm import make_norm
from octavo.runtime.models.arch import Arch, Config, arch_fields, read_dense, read_heads, read_norm, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.media import Features, ImageEncoder
from octavo.runtime.models.vision import CLIP as VISION
from octavo.runtime.models.vision import (
    SIGLIP,
    Projector,
    VisionTower,
    cut_patches,
    read_tower,
    row,
    tower_weights,
)
from octavo.runtime.models.weights import WeightMap, qkv, to
from octavo.runtime.transfer import Send

_LAYER = "text_model.encoder.layers.*."


@dataclass(frozen=True, kw_only=True)
class ContrastiveArch(Arch):
    """A ContrastiveArch describes the tower of texts. outputs: size of vectors"""

    outputs: int
    projection_bias: bool = False


class CLIP(Decoder):
    """Takes a ContrastiveArch."""

    WEIGHTS = WeightMap(
        {
            "text_model.embeddings.token_embedding": to("embed_tokens"),
            "text_model.embeddings.position_embedding": to("embed_positions"),
            f"{_LAYER}layer_norm1": to("layers.*.attention_norm"),
            f"{_LAYER}layer_norm2": to("layers.*.mlp_norm"),
            **qkv(f"{_LAYER}self_attn.?_proj", "layers.*.attention.qkv"),
            f"{_LAYER}self_attn.out_proj": to("layers.*.attention.out"),
            f"{_LAYER}mlp.fc1": to("layers.*.mlp.up"),
            f"{_LAYER}mlp.fc2": to("layers.*.mlp.down"),
            "text_model.final_layer_norm": to("norm"),
            "text_model.head": to("projection"),
            "text_projection": to("projection"),
        },
        ignored=(r"position_ids$", r"^logit_(scale|bias)$"),
    )

    def __init__(self, arch: Arch, build: BuildContext) -> None:
        super().__init__(arch, build)
        assert isinstance(arch, ContrastiveArch)
        place = build.at("projection")
        self.projection = ReplicatedLinear(place, arch.hidden_size, arch.outputs, arch.projection_bias)

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        return _read_texts(config, outputs=size_of(config, "projection_dim"))

    def embed(self, batch: ForwardBatch) -> Tensor:
        x: Tensor = self.embed_tokens(batch.input_ids) + self.embed_positions(batch.positions)
        return x

    def forward(self, batch: ForwardBatch) -> Tensor:
        return batch.with_given_embeds(self.projection(super().forward(batch)))


class SigLIP(CLIP):
    """Its projection has a bias, and its tokens see each other."""

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        size = config.get("projection_size") or size_of(config, "hidden_size")
        return _read_texts(config, outputs=size, projection_bias=True)


def _read_texts(config: Config, **own: Any) -> ContrastiveArch:
    fields = arch_fields(
        config,
        attention=read_heads(config, qkv_bias=True, out_bias=True),
        feed_forward=read_dense(config, gated=False, bias=True),
        rope=None,
        num_learned_positions=size_of(config, "max_position_embeddings"),
        norm=read_norm(config),
        tied_head=False,
    )
    return ContrastiveArch(**fields, **own)


class CLIPEncoder(ImageEncoder):
    """Reads `pixel_values`, [1, 3, side, side] of each picture; projects its class token."""

    WEIGHTS: ClassVar = tower_weights("vision_model.") | {"visual_projection": to("encoder.projection")}
    DEFAULTS: ClassVar[Config] = VISION

    def __init__(self, config: Config, build: BuildContext) -> None:
        super().__init__(config, build)
        vision = self.DEFAULTS | config["vision_config"]
        self._patch_size, self.side = size_of(vision, "patch_size"), size_of(vision, "image_size")
        arch = read_tower(vision)
        self.tower = VisionTower(arch, build.at("tower"))
        self.add_head(vision, arch.size, size_of(config["text_config"], "projection_dim", 512), build)

    def add_head(self, vision: Config, size: int, outputs: int, build: BuildContext) -> None:
        """Add what makes one vector of a picture. size: of a hidden state"""
        self.projection = ReplicatedLinear(build.at("projection"), size, outputs, bias=False)

    def see(self, items: Sequence[Features], send: Send) -> list[Tensor]:
        pixels = torch.cat([item["pixel_values"] for item in items])
        return list(torch.split(self.pool(self.tower(cut_patches(pixels, self._patch_size), send)), 1))

    def pool(self, hidden: Tensor) -> Tensor:
        """Map [N, P, size] to [N, outputs]."""
        vectors: Tensor = self.projection(hidden[:, 0])
        return vectors


class SigLIPEncoder(CLIPEncoder):
    """A learned query attends to all patches."""

    WEIGHTS: ClassVar = tower_weights("vision_model.") | {
        "vision_model.head.probe": to("encoder.probe.weight", "", row),
        "vision_model.head.attention.in_proj_weight": to("encoder.qkv.weight"),
        "vision_model.head.attention.in_proj_bias": to("encoder.qkv.bias"),
        "vision_model.head.attention.out_proj": to("encoder.out"),
        "vision_model.head.layernorm": to("encoder.norm"),
        "vision_model.head.mlp.fc1": to("encoder.mlp.up"),
        "vision_model.head.mlp.fc2": to("encoder.mlp.down"),
    }
    DEFAULTS: ClassVar[Config] = SIGLIP

    def add_head(self, vision: Config, size: int, outputs: int, build: BuildContext) -> None:
        self._num_heads = size_of(vision, "num_attention_heads")
        self.probe = Embedding(build.at("probe"), 1, size)
        self.qkv = ReplicatedLinear(build.at("qkv"), size, 3 * size, bias=True)
        self.out = ReplicatedLinear(build.at("out"), size, size, bias=True)
        self.norm: nn.Module = make_norm(read_norm({"layer_norm_eps": 1e-6} | vision), build.at("norm"), size)
        inner, activation = size_of(vision, "intermediate_size"), vision["hidden_act"]
        self.mlp = Projector(build.at("mlp"), (size, inner, size), activation, True)

    def pool(self, hidden: Tensor) -> Tensor:
        probe = self.probe(torch.zeros(1, dtype=torch.int64, device=hidden.device))
        query = self.qkv(probe).chunk(3, -1)[0].expand(len(hidden), 1, -1)
        _, keys, values = self.qkv(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1).chunk(3, -1)
        heads = (x.unflatten(-1, (self._num_heads, -1)).transpose(1, 2) for x in (query, keys, values))
        seen = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)[:, 0]
        x = self.out(seen)
        pooled: Tensor = x + self.mlp(self.norm(x))
        return pooled
