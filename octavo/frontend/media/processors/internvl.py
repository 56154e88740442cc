"""InternVL: an image is cut into tiles of the grid most like it, and a small copy of the whole follows."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from PIL import Image

from octavo.frontend.media import pixels
from octavo.frontend.media.processors.interface import CLIP, Arrays, Encode, ImageProcessor, Settings
from octavo.frontend.media.video import VideoInfo


class InternVLProcessor(ImageProcessor):
    """All tiles have equally many tokens."""

    DEFAULTS: ClassVar[Settings] = CLIP | {
        "size": {"height": 384, "width": 384},
        "crop_to_patches": False,
        "min_patches": 1,
        "max_patches": 12,
    }
    OVERRIDES: ClassVar[Settings] = {"crop_to_patches": True}
    VIDEO_DEFAULTS: ClassVar[Settings | None] = DEFAULTS
    OPTIONS = ImageProcessor.OPTIONS | {"crop_to_patches", "min_patches", "max_patches"}

    def __init__(self, config: Settings, settings: Settings, encode: Encode) -> None:
        super().__init__(config, settings, encode)
        self.video_id = self.token_of("<video>")

    @staticmethod
    def prepare(image: Image.Image, settings: Settings) -> Arrays:
        height, width, resample = settings["size"]["height"], settings["size"]["width"], settings["resample"]
        rows = columns = 1
        if settings["crop_to_patches"] and settings["max_patches"] > 1:
            rows, columns = best_grid(image, height, width, settings["min_patches"], settings["max_patches"])
        whole = pixels.resized(image, rows * height, columns * width, resample)
        corners = [(x * width, y * height) for y in range(rows) for x in range(columns)]
        tiles = [whole.crop((x, y, x + width, y + height)) for x, y in corners]
        if len(tiles) > 1:
            tiles.append(pixels.resized(image, height, width, resample))
        values = [pixels.normalised(np.asarray(tile), settings) for tile in tiles]
        return {"pixel_values": np.stack(values)}

    @staticmethod
    def prepare_video(frames: list[Image.Image], video: VideoInfo, settings: Settings) -> Arrays:
        """Return a tile for each frame."""
        size, resample = settings["size"], settings["resample"]
        tiles = [pixels.resized(frame, size["height"], size["width"], resample) for frame in frames]
        return {"pixel_values": np.stack([pixels.normalised(np.asarray(tile), settings) for tile in tiles])}

    def video_tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        """Return the tokens of each frame behind its number."""
        each, ids = self._tokens_of_a_tile(arrays), list[int]()
        for number in range(1, len(arrays["pixel_values"]) + 1):
            told = f"Frame{number}: " if number == 1 else f"\nFrame{number}: "
            ids += [*self.encode(told), *self.tokens_of_embeds(each)]
        return ids

    def placeholder(self, modality: str) -> int:
        return self.placeholder_id

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        return self.tokens_of_embeds(len(arrays["pixel_values"]) * self._tokens_of_a_tile(arrays))

    def _tokens_of_a_tile(self, arrays: Mapping[str, np.ndarray]) -> int:
        height, width = arrays["pixel_values"].shape[-2:]
        patch = self.config["vision_config"].get("patch_size", 14)
        patches = (patch, patch) if isinstance(patch, int) else tuple(patch)
        ratio = self.config.get("downsample_ratio", 0.5)
        return int(height // patches[0] * ratio) * int(width // patches[1] * ratio)

    def tokens_of_embeds(self, count: int) -> list[int]:
        return [*self.encode("<img>"), *super().tokens_of_embeds(count), *self.encode("</img>")]


def best_grid(image: Image.Image, height: int, width: int, fewest: int, most: int) -> tuple[int, int]:
    """Return (rows, columns): of proportions nearest to the image's, the last not too large."""
    grids = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if fewest <= x * y <= most]
    ratio, area, nearest, best = image.width / image.height, image.width * image.height, float("inf"), (1, 1)
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(ratio - columns / rows)
        is_large_enough = area > 0.5 * height * width * columns * rows
        if difference < nearest or (difference == nearest and is_large_enough):
            nearest, best = difference, (rows, columns)
    return best
