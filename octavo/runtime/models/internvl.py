"""InternVL joins neighbouring patches of a transformer whose layers scale what they add."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo.base.errors import Unsupported
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.norm import LayerScale, make_norm
from octavo.runtime.models.arch import Config, LayerArch, expect, read_norm, size_of
from octavo.runtime.models.idefics3 import join_patches
from octavo.runtime.models.media import Features, ImageEncoder
from octavo.runtime.models.vision import Projector, VisionArch, VisionTower, cut_patches, flat, tower_body
from octavo.runtime.models.weights import qkv, to
from octavo.runtime.transfer import Send

_VISION: Config = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
"""What transformers assumes where a vision_config is silent."""
_TOWER, _LAYER, _BLOCK = "vision_tower.", "vision_tower.encoder.layer.*.", "encoder.tower.blocks.*."
_PATCHES = f"{_TOWER}embeddings.patch_embeddings.projection"


def _table(tensor: Any, layer: LayerArch | None) -> Any:
    """Turn [1, positions, size], or one row, to a table."""
    return tensor.reshape(-1, tensor.shape[-1])


class InternVLEncoder(ImageEncoder):
    """Reads `pixel_values`, [tiles, 3, side, side] of each image."""

    WEIGHTS: ClassVar = {
        f"{_TOWER}embeddings.cls_token": to("encoder.tower.class_token.weight", "", _table),
        f"{_TOWER}embeddings.position_embeddings": to("encoder.tower.positions.weight", "", _table),
        f"{_PATCHES}.weight": to("encoder.tower.patches.weight", "", flat),
        _PATCHES: to("encoder.tower.patches"),
        f"{_TOWER}layernorm": to("encoder.tower.norm_out"),
        f"{_LAYER}layernorm_before": to(f"{_BLOCK}attention_norm"),
        f"{_LAYER}layernorm_after": to(f"{_BLOCK}mlp_norm"),
        f"{_LAYER}lambda_1": to(f"{_BLOCK}attention_out_norm.weight"),
        f"{_LAYER}lambda_2": to(f"{_BLOCK}mlp_out_norm.weight"),
        **qkv(f"{_LAYER}attention.?_proj", f"{_BLOCK}attention.qkv"),
        f"{_LAYER}attention.projection_layer": to(f"{_BLOCK}attention.out"),
        f"{_LAYER}mlp.fc1": to(f"{_BLOCK}mlp.up"),
        f"{_LAYER}mlp.fc2": to(f"{_BLOCK}mlp.down"),
        "multi_modal_projector.layer_norm": to("encoder.norm"),
        "multi_modal_projector.linear_1": to("encoder.projector.up"),
        "multi_modal_projector.linear_2": to("encoder.projector.down"),
    }

    def __init__(self, config: Config, build: BuildContext) -> None:
        super().__init__(config, build)
        vision: Config = _VISION | config["vision_config"]
        vision |= {name: _square(vision, name) for name in ("image_size", "patch_size")}
        expect(vision, norm_type="layer_norm", use_qk_norm=False, use_absolute_position_embeddings=True)
        expect(config, vision_feature_layer=-1, vision_feature_select_strategy="default")
        arch = _read_tower(vision)
        self._patch_size, self.side = size_of(vision, "patch_size"), size_of(vision, "image_size")
        self._scale = round(1 / config.get("downsample_ratio", 0.5))
        self.tower = VisionTower(arch, build.at("tower"))
        for number, block in enumerate(self.tower.blocks):
            place = build.at(f"tower.blocks.{number}")
            block.attention_out_norm = LayerScale(place.at("attention_out_norm"), arch.size)
            block.mlp_out_norm = LayerScale(place.at("mlp_out_norm"), arch.size)
        joined, size = arch.size * self._scale**2, size_of(config["text_config"], "hidden_size")
        self.norm: nn.Module = make_norm(read_norm({}), build.at("norm"), joined)
        activation = config.get("projector_hidden_act", "gelu")
        self.projector = Projector(build.at("projector"), (joined, size, size), activation, True)

    def see(self, items: Sequence[Features], send: Send) -> list[Tensor]:
        pixels = torch.cat([item["pixel_values"] for item in items])
        side = pixels.shape[-1] // self._patch_size
        hidden = self.tower(cut_patches(pixels, self._patch_size), send)[:, 1:]
        joined = join_patches(hidden.reshape(len(pixels), side, side, -1), self._scale)
        embeds: Tensor = self.projector(self.norm(joined.flatten(0, 2)))
        counts = [len(item["pixel_values"]) * (side // self._scale) ** 2 for item in items]
        return list(torch.split(embeds, counts))


def _read_tower(vision: Config) -> VisionArch:
    patch = size_of(vision, "patch_size")
    return VisionArch(
        body=tower_body(vision, read_norm(vision), qkv_bias=bool(vision.get("attention_bias"))),
        patch_inputs=size_of(vision, "num_channels", 3) * patch**2,
        num_positions=(size_of(vision, "image_size") // patch) ** 2 + 1,
        has_class_token=True,
        norm_out=not vision.get("use_mean_pooling", True),
    )


def _square(vision: Config, name: str) -> int:
    given = vision[name]
    if isinstance(given, list):
        if len(set(given)) > 1:
            raise Unsupported(f"{name}={given}: only squares are supported.")
        return int(given[0])
    return int(given)
