"""InternVL: an image is cut into tiles of the grid most like it, and a small copy of the whole follows."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from PIL import Image

from octavo.frontend.media import pixels
from octavo.frontend.media.processors.interface import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    Arrays,
    ImageProcessor,
    Settings,
)


class InternVLProcessor(ImageProcessor):
    """All tiles have equally many tokens."""

    DEFAULTS: ClassVar[Settings] = {
        "size": {"height": 384, "width": 384},
        "resample": BICUBIC,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "crop_to_patches": False,
        "min_patches": 1,
        "max_patches": 12,
    }
    OVERRIDES: ClassVar[Settings] = {"crop_to_patches": True}
    OPTIONS = ImageProcessor.OPTIONS | {"crop_to_patches", "min_patches", "max_patches"}

    @staticmethod
    def prepare(image: Image.Image, settings: Settings) -> Arrays:
        height, width, resample = settings["size"]["height"], settings["size"]["width"], settings["resample"]
        rows = columns = 1
        if settings["crop_to_patches"] and settings["max_patches"] > 1:
            rows, columns = _best_grid(image, height, width, settings["min_patches"], settings["max_patches"])
        whole = pixels.resized(image, rows * height, columns * width, resample)
        corners = [(x * width, y * height) for y in range(rows) for x in range(columns)]
        tiles = [whole.crop((x, y, x + width, y + height)) for x, y in corners]
        if len(tiles) > 1:
            tiles.append(pixels.resized(image, height, width, resample))
        values = [pixels.normalised(np.asarray(tile), settings) for tile in tiles]
        return {"pixel_values": np.stack(values)}

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        num_tiles, _, height, width = arrays["pixel_values"].shape
        patch = self.config["vision_config"].get("patch_size", 14)
        patches = (patch, patch) if isinstance(patch, int) else tuple(patch)
        ratio = self.config.get("downsample_ratio", 0.5)
        each = int(height // patches[0] * ratio) * int(width // patches[1] * ratio)
        return self.tokens_of_embeds(num_tiles * each)

    def tokens_of_embeds(self, count: int) -> list[int]:
        return [*self.encode("<img>"), *super().tokens_of_embeds(count), *self.encode("</img>")]


def _best_grid(image: Image.Image, height: int, width: int, fewest: int, most: int) -> tuple[int, int]:
    """Return (rows, columns): of proportions nearest to the image's, the last not too large."""
    grids = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if fewest <= x * y <= most]
    ratio, area, nearest, best = image.width / image.height, image.width * image.height, float("inf"), (1, 1)
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(ratio - columns / rows)
        is_large_enough = area > 0.5 * height * width * columns * rows
        if difference < nearest or (difference == nearest and is_large_enough):
            nearest, best = difference, (rows, columns)
    return best
