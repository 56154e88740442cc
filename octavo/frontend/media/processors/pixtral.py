"""Pixtral and Mistral 3: an image keeps its proportions; a token ends each row of its patches."""

from collections.abc import Mapping
from math import floor
from typing import ClassVar

import numpy as np
from PIL import Image

from octavo.frontend.media import pixels
from octavo.frontend.media.processors.interface import CLIP, Arrays, Encode, ImageProcessor, Settings

_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


class PixtralProcessor(ImageProcessor):
    """Mistral 3 merges squares of patches; of Pixtral a square is one patch."""

    DEFAULTS: ClassVar[Settings] = CLIP | {"size": {"longest_edge": 1024}}
    MERGE: ClassVar[int] = 1

    def __init__(self, config: Settings, settings: Settings, encode: Encode) -> None:
        super().__init__(config, settings, encode)
        side = config["vision_config"].get("patch_size", 16) * config.get("spatial_merge_size", self.MERGE)
        self.settings = {**self.settings, "patch_size": {"height": side, "width": side}}

    @staticmethod
    def prepare(image: Image.Image, settings: Settings) -> Arrays:
        if settings.get("do_resize", True):
            size, side = settings["size"], settings["patch_size"]["height"]
            height, width = image.height, image.width
            ratio = max(
                height / size.get("longest_edge", size.get("height", 0)),
                width / size.get("longest_edge", size.get("width", 0)),
            )
            if ratio > 1:
                height, width = floor(height / ratio), floor(width / ratio)
            rows, columns = (height - 1) // side + 1, (width - 1) // side + 1
            image = pixels.resized(image, rows * side, columns * side, settings["resample"])
        return {"pixel_values": pixels.normalised(np.asarray(image), settings)[None]}

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        side = self.settings["patch_size"]["height"]
        rows, columns = (int(length) // side for length in arrays["pixel_values"].shape[-2:])
        line = [*super().tokens_of_embeds(columns), *self.encode(_BREAK)]
        return [*(line * rows)[:-1], *self.encode(_END)]


class Mistral3Processor(PixtralProcessor):
    """By default four patches are merged to one token."""

    MERGE: ClassVar[int] = 2
