"""Gemma 3 averages squares of a SigLIP's patches, normalises them and projects them to embeddings of text."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from octavo.base.errors import BadCheckpoint
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.layers.norm import Norm, NormArch, make_norm
from octavo.runtime.models.arch import Config, LayerArch, size_of
from octavo.runtime.models.gemma import plus_one
from octavo.runtime.models.media import Features, ImageEncoder
from octavo.runtime.models.vision import SIGLIP, VisionTower, cut_patches, read_tower, tower_weights
from octavo.runtime.models.weights import to
from octavo.runtime.transfer import Send


def _transpose(tensor: Any, layer: LayerArch | None) -> Any:
    return tensor.t()


class Gemma3Encoder(ImageEncoder):
    """Reads `pixel_values`, [1 + crops, 3, side, side] of each image."""

    WEIGHTS: ClassVar = tower_weights("vision_tower.") | {
        "multi_modal_projector.mm_input_projection_weight": to("encoder.projector.weight", "", _transpose),
        "multi_modal_projector.mm_soft_emb_norm": to("encoder.norm", "", plus_one),
    }

    def __init__(self, config: Config, build: BuildContext) -> None:
        super().__init__(config, build)
        vision: Config = SIGLIP | config["vision_config"]
        arch = read_tower(vision)
        self._patch_size, self.side = size_of(vision, "patch_size"), size_of(vision, "image_size")
        self._side = self.side // self._patch_size
        side = int(size_of(config, "mm_tokens_per_image", 256) ** 0.5)
        if self._side % side:
            raise BadCheckpoint(f"{self._side} patches in a row cannot be joined to {side}")
        self._joined = self._side // side
        self.tower = VisionTower(arch, build.at("tower"))
        self.norm: Norm = make_norm(
            NormArch(eps=vision.get("layer_norm_eps", 1e-6)), build.at("norm"), arch.size
        )
        size = size_of(config["text_config"], "hidden_size")
        self.projector = ReplicatedLinear(build.at("projector"), arch.size, size, False)

    def see(self, items: Sequence[Features], send: Send) -> list[Tensor]:
        pixels = torch.cat([item["pixel_values"] for item in items])
        hidden = self.tower(cut_patches(pixels, self._patch_size), send).transpose(1, 2)
        squares = functional.avg_pool2d(hidden.unflatten(2, (self._side, self._side)), self._joined)
        means = squares.flatten(2).transpose(1, 2).flatten(0, 1).contiguous()
        embeds: Tensor = self.projector(self.norm(means))
        each = len(embeds) // len(pixels)
        return list(torch.split(embeds, [len(item["pixel_values"]) * each for item in items]))
