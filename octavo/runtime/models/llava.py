"""LLaVA 1.5 projects the patches of a CLIP, as they are before its last layer, to embeddings of text."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from octavo.base.errors import Unsupported
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.models import vision
from octavo.runtime.models.arch import Config, size_of
from octavo.runtime.models.media import Features, ImageEncoder
from octavo.runtime.models.weights import to
from octavo.runtime.transfer import Send


class LlavaEncoder(ImageEncoder):
    """Reads `pixel_values`, [1, 3, H, W] of each image."""

    WEIGHTS: ClassVar = vision.tower_weights("vision_tower.") | {
        "multi_modal_projector.linear_1": to("encoder.projector.up"),
        "multi_modal_projector.linear_2": to("encoder.projector.down"),
    }

    def __init__(self, config: Config, build: BuildContext) -> None:
        super().__init__(config, build)
        tower: Config = config["vision_config"]
        tower = (vision.CLIP if tower.get("model_type") == "clip_vision_model" else vision.SIGLIP) | tower
        arch = vision.read_tower(tower)
        strategy = config.get("vision_feature_select_strategy", "default")
        if strategy not in ("default", "full"):
            raise Unsupported(f"vision_feature_select_strategy={strategy!r} is neither 'default' nor 'full'.")
        self._patch_size, self.side = size_of(tower, "patch_size"), size_of(tower, "image_size")
        self._first = int(strategy == "default")
        self._layers = vision.chosen_layers(config, len(arch.body.layers))
        self.tower = vision.VisionTower(arch.shortened(max(self._layers)), build.at("tower"))
        size = size_of(config["text_config"], "hidden_size")
        self.projector = vision.Projector(
            build.at("projector"),
            (arch.size * len(self._layers), size, size),
            config.get("projector_hidden_act", "gelu"),
            bool(config.get("multimodal_projector_bias", True)),
        )

    def unused(self) -> tuple[str, ...]:
        """See MediaEncoder: the layers behind the last that is taken."""
        numbers = r"\.encoder\.layers\.(?!({})\.)".format("|".join(map(str, range(len(self.tower.blocks)))))
        return (r"vision_tower\..*post_layernorm\.", r"vision_tower(\.vision_model)?" + numbers)

    def see(self, items: Sequence[Features], send: Send) -> list[Tensor]:
        pixels = torch.cat([item["pixel_values"] for item in items])
        hidden = self.tower(vision.cut_patches(pixels, self._patch_size), send, self._layers)
        embeds: Tensor = self.projector(hidden[:, self._first :].flatten(0, 1))
        return list(embeds.view(len(items), -1, embeds.shape[-1]))
