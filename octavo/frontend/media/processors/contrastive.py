"""CLIP and SigLIP embed a picture as a whole: one token stands for it."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from PIL import Image

from octavo.frontend.media import pixels
from octavo.frontend.media.processors.interface import HALF, Arrays, Encode, ImageProcessor, Settings
from octavo.frontend.media.processors.llava import LlavaProcessor


class _OneToken(ImageProcessor):
    """Takes the first token for a marker: there is no text beside it."""

    def __init__(self, config: Settings, settings: Settings, encode: Encode) -> None:
        super().__init__({**config, "image_token_id": 0}, settings, encode)

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        return [self.placeholder_id]


class CLIPProcessor(_OneToken, LlavaProcessor):
    """Sees what LLaVA 1.5 sees."""


class SigLIPProcessor(_OneToken):
    """Gives any image the proportions of a square."""

    DEFAULTS: ClassVar[Settings] = HALF | {"size": {"height": 224, "width": 224}}

    @staticmethod
    def prepare(image: Image.Image, settings: Settings) -> Arrays:
        if settings.get("do_resize", True):
            image = pixels.resized(image, *pixels.wanted_size(image, settings["size"]), settings["resample"])
        return {"pixel_values": pixels.normalised(np.asarray(image), settings)[None]}
