"""Idefics3 and SmolVLM join neighbouring patches of a SigLIP, and project them to embeddings of text."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.models.arch import Config, size_of
from octavo.runtime.models.media import Features, ImageEncoder
from octavo.runtime.models.vision import VisionTower, cut_patches, read_tower, tower_weights
from octavo.runtime.models.weights import to
from octavo.runtime.transfer import Send

SIGLIP_SO: Config = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
}
"""What transformers assumes where a vision_config is silent."""


class Idefics3Encoder(ImageEncoder):
    """Reads `pixel_values`, [squares, 3, side, side] of each image."""

    WEIGHTS: ClassVar = tower_weights("vision_model.") | {
        "connector.modality_projection.proj": to("encoder.projector")
    }

    def __init__(self, config: Config, build: BuildContext) -> None:
        super().__init__(config, build)
        vision: Config = SIGLIP_SO | config["vision_config"]
        arch = read_tower(vision, patch_bias=True)
        self._patch_size, self._scale = size_of(vision, "patch_size"), size_of(config, "scale_factor", 2)
        self.side = size_of(vision, "image_size")
        self._grid = self.side // self._patch_size
        self.tower = VisionTower(arch, build.at("tower"))
        size = size_of(config["text_config"], "hidden_size")
        self.projector = ReplicatedLinear(build.at("projector"), arch.size * self._scale**2, size, False)

    def see(self, items: Sequence[Features], send: Send) -> list[Tensor]:
        pixels = torch.cat([item["pixel_values"] for item in items])
        side = pixels.shape[-1] // self._patch_size
        if side % self._scale:
            raise BadCheckpoint(f"{side} patches in a row cannot be joined by {self._scale}")
        places = positions_in_grid(side, self._grid, pixels.device)
        hidden = self.tower(cut_patches(pixels, self._patch_size), send, positions=places)
        joined = join_patches(hidden.view(len(pixels), side, side, -1), self._scale)
        embeds: Tensor = self.projector(joined.flatten(0, 2))
        counts = [len(item["pixel_values"]) * (side // self._scale) ** 2 for item in items]
        return list(torch.split(embeds, counts))


def positions_in_grid(side: int, grid: int, device: torch.device, width: int = 0) -> Tensor:
    """Return the learned positions of side x side patches, [side * side], of a grid that may be another.

    width: of patches, if another. Computed as in transformers, in float32 and with its boundaries, whose
    roundings count.
    """
    boundaries = torch.arange(1 / grid, 1.0, 1 / grid, device=device)
    rows, columns = (
        torch.bucketize((torch.arange(n, device=device) * step).clamp(max=1.0 - 1e-6), boundaries, right=True)
        for n, step in ((n, torch.ones((), device=device) / n) for n in (side, width or side))
    )
    return (rows[:, None] * grid + columns[None, :]).flatten()


def join_patches(hidden: Tensor, scale: int) -> Tensor:
    """Put squares of scale x scale patches side by side: [N, H, W, C] to [N, H / s, W / s, s * s * C]."""
    count, height, width, size = hidden.shape
    rows = hidden.view(count, height // scale, scale, width // scale, scale, size)
    return rows.transpose(2, 3).flatten(3)
