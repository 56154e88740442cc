"""Gemma 3: an image becomes a square; of a long one, parts may follow the whole (pan and scan)."""

from collections.abc import Mapping
from math import ceil
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from octavo.frontend.media import pixels
from octavo.frontend.media.processors import interface

_LINES = "\n\n"
_MOST_NEWLINES = 16


class Gemma3Processor(interface.ImageProcessor):
    """Tokens of an image see each other; lines are left free around them."""

    DEFAULTS: ClassVar[interface.Settings] = interface.HALF | {
        "size": {"height": 224, "width": 224},
        "resample": interface.BILINEAR,
        "do_pan_and_scan": False,
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    OPTIONS = interface.ImageProcessor.OPTIONS | {name for name in DEFAULTS if "pan_and_scan" in name}
    sees_itself: ClassVar[bool] = True

    def __init__(
        self, config: interface.Settings, settings: interface.Settings, encode: interface.Encode
    ) -> None:
        super().__init__(config, settings, encode)
        self.marker_id = config.get("boi_token_index", 255_999)
        self._newlines: dict[int, int] | None = None

    @staticmethod
    def prepare(image: Image.Image, settings: interface.Settings) -> interface.Arrays:
        images = [image, *(_parts(image, settings) if settings["do_pan_and_scan"] else [])]
        if settings.get("do_resize", True):
            size = settings["size"]
            images = [pixels.resized(i, size["height"], size["width"], settings["resample"]) for i in images]
        return {"pixel_values": np.stack([pixels.normalised(np.asarray(i), settings) for i in images])}

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        num_parts, each = len(arrays["pixel_values"]) - 1, self.config.get("mm_tokens_per_image", 256)
        if not num_parts:
            return self.tokens_of_embeds(each)
        told = f"{_LINES} and here are some crops to help you see better {_LINES}"
        between = [told, *[f"{_LINES} {_LINES}"] * (num_parts - 1), _LINES]
        ids = self.encode(f"Here is the original image {_LINES}")
        for text in between:
            ids += [*self._image(each), *self.encode(text)]
        return ids

    def tokens_of_embeds(self, count: int) -> list[int]:
        return [*self.encode(_LINES), *self._image(count), *self.encode(_LINES)]

    def _image(self, count: int) -> list[int]:
        return [self.marker_id, *[self.placeholder_id] * count, self.config.get("eoi_token_index", 256_000)]

    def joined(self, left: int, right: int) -> int | None:
        """See ImageProcessor: lines that follow each other are one token, as in a whole text."""
        if self._newlines is None:
            runs = {count: self.encode("\n" * count) for count in range(1, _MOST_NEWLINES)}
            self._newlines = {ids[0]: count for count, ids in runs.items() if len(ids) == 1}
        counts = self._newlines
        if left not in counts or right not in counts:
            return None
        whole = counts[left] + counts[right]
        return next((token for token, count in counts.items() if count == whole), None)


def _parts(image: Image.Image, settings: Mapping[str, Any]) -> list[Image.Image]:
    """Cut a long image along its longer side; [] for others."""
    short, long = sorted(image.size)
    least = settings["pan_and_scan_min_crop_size"]
    if long / short < settings["pan_and_scan_min_ratio_to_activate"]:
        return []
    count = max(2, min(long // least, int(long / short + 0.5)))
    count = min(settings["pan_and_scan_max_num_crops"], count)
    step = ceil(long / count)
    if min(step, short) < least:
        return []
    starts = [step * i for i in range(count)]
    if image.width >= image.height:
        return [image.crop((x, 0, min(x + step, image.width), image.height)) for x in starts]
    return [image.crop((0, y, image.width, min(y + step, image.height))) for y in starts]
