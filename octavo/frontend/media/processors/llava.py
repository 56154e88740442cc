"""LLaVA 1.5: the middle of an image, resized so that its smaller side fits CLIP."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from PIL import Image

from octavo.frontend.media import pixels
from octavo.frontend.media.processors.interface import CLIP, Arrays, ImageProcessor, Settings


class LlavaProcessor(ImageProcessor):
    """Every image has equally many tokens."""

    DEFAULTS: ClassVar[Settings] = CLIP | {
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
    }
    OPTIONS = ImageProcessor.OPTIONS | {"do_pad", "do_center_crop", "crop_size"}

    @staticmethod
    def prepare(image: Image.Image, settings: Settings) -> Arrays:
        if settings.get("do_pad"):
            image = squared(image, settings["image_mean"])
        if settings.get("do_resize", True):
            height, width = pixels.wanted_size(image, settings["size"])
            image = pixels.resized(image, height, width, settings["resample"])
        array = np.asarray(image)
        if settings.get("do_center_crop", True):
            crop = settings["crop_size"]
            array = pixels.center_crop(array, crop["height"], crop["width"])
        return {"pixel_values": pixels.normalised(array, settings)[None]}

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        height, width = arrays["pixel_values"].shape[-2:]
        vision = self.config["vision_config"]
        patch, is_full = (
            vision.get("patch_size", 32),
            self.config.get("vision_feature_select_strategy") == "full",
        )
        has_class_token = vision.get("model_type") == "clip_vision_model"
        count = (height // patch) * (width // patch)
        return [self.placeholder_id] * (count + has_class_token - (not is_full))


def squared(image: Image.Image, mean: list[float]) -> Image.Image:
    """Put an image into the middle of a square of the mean colour."""
    side = max(image.size)
    whole = Image.new("RGB", (side, side), tuple(int(x * 255) for x in mean))
    whole.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return whole
