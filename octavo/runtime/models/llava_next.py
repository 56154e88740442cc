"""LLaVA-NeXT and OneVision project a copy of an image and the squares of a larger one, put together again."""

from collections.abc import Sequence
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from octavo.base.errors import BadCheckpoint
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.embedding import Embedding
from octavo.runtime.models.arch import Config, size_of
from octavo.runtime.models.llava import LlavaEncoder
from octavo.runtime.models.media import Features
from octavo.runtime.models.vision import cut_patches, row
from octavo.runtime.models.weights import to
from octavo.runtime.transfer import Send


class LlavaNextEncoder(LlavaEncoder):
    """Reads `pixel_values`, [1 + squares, 3, side, side], `image_sizes` and `grid` of squares, [2] each."""

    WEIGHTS: ClassVar = LlavaEncoder.WEIGHTS | {"image_newline": to("encoder.newline.weight", "", row)}
    FEATURES: ClassVar[Config] = {}
    """What transformers assumes where a config does not say which features are taken."""

    def __init__(self, config: Config, build: BuildContext) -> None:
        super().__init__(self.FEATURES | config, build)
        self.newline = Embedding(build.at("newline"), 1, size_of(config["text_config"], "hidden_size"))

    def see(self, items: Sequence[Features], send: Send) -> list[Tensor]:
        pixels = torch.cat([item["pixel_values"] for item in items])
        hidden = self.tower(cut_patches(pixels, self._patch_size), send, self._layers)[:, self._first :]
        embeds = self.projector(hidden.flatten(0, 1)).unflatten(0, (len(pixels), -1))
        parts = embeds.split([len(item["pixel_values"]) for item in items])
        sizes = [
            [*item["image_sizes"].tolist(), *item["grid"].tolist()] if "grid" in item else []
            for item in items
        ]
        return [
            self._packed(part, size[:2], size[2:]) if size else self._video(part)
            for part, size in zip(parts, sizes, strict=True)
        ]

    def _video(self, embeds: Tensor) -> Tensor:
        """Return the tokens of frames at half of their size, and the end. embeds: [frames, patches, size]"""
        patches = self.side // self._patch_size
        half = (patches + 1) // 2
        frames = embeds.view(len(embeds), patches, patches, -1).permute(0, 3, 1, 2)
        halved = functional.interpolate(frames, [half, half], mode="bilinear").flatten(2).transpose(1, 2)
        return torch.cat([halved.flatten(0, 1), self._end(embeds)])

    def _end(self, embeds: Tensor) -> Tensor:
        end: Tensor = self.newline(torch.zeros(1, dtype=torch.int64, device=embeds.device))
        return end

    def _packed(self, embeds: Tensor, original: list[int], grid: list[int]) -> Tensor:
        """Return the tokens of the copy, then rows of the squares together, each with its end."""
        patches = self.side // self._patch_size
        if embeds.shape[1] != patches**2:
            raise BadCheckpoint(f"{embeds.shape[1]} features of a square; {patches} x {patches} are expected")
        whole = embeds[1:].view(*grid, patches, patches, -1)
        whole = self._shrunk(_cropped(whole.transpose(1, 2).flatten(2, 3).flatten(0, 1), original), patches)
        rows = torch.cat([whole, self._end(embeds).expand(len(whole), 1, -1)], dim=1)
        return torch.cat([embeds[0], rows.flatten(0, 1)])

    def _shrunk(self, whole: Tensor, patches: int) -> Tensor:
        return whole


class OneVisionEncoder(LlavaNextEncoder):
    """OneVision takes the last layer of a SigLIP, and shrinks what would be too many tokens."""

    FEATURES: ClassVar[Config] = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}

    def __init__(self, config: Config, build: BuildContext) -> None:
        super().__init__(config, build)
        ratio = str(config.get("vision_aspect_ratio", "anyres_max_9"))
        self._most = int(ratio.removeprefix("anyres_max_"))

    def _shrunk(self, whole: Tensor, patches: int) -> Tensor:
        height, width, _ = whole.shape
        ratio = sqrt(height * width / (self._most * patches**2))
        if ratio <= 1.1:
            return whole
        size = [int(height // ratio), int(width // ratio)]
        return functional.interpolate(whole.permute(2, 0, 1)[None], size, mode="bilinear")[0].permute(1, 2, 0)


def _cropped(whole: Tensor, original: list[int]) -> Tensor:
    """Cut off what stands for padding. whole: [rows, columns, size]"""
    height, width, _ = whole.shape
    if original[1] / original[0] > width / height:
        cut = (height - int(round(original[0] * (width / original[1]), 7))) // 2
        return whole[cut : height - cut]
    cut = (width - int(round(original[1] * (height / original[0]), 7))) // 2
    return whole[:, cut : width - cut]
