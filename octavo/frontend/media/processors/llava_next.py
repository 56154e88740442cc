"""LLaVA-NeXT and OneVision: a copy of the image, and squares of one that is as large as a fitting grid."""

from collections.abc import Mapping, Sequence
from math import ceil, sqrt
from typing import ClassVar

import numpy as np
from PIL import Image

from octavo.frontend.media import pixels
from octavo.frontend.media.processors.interface import CLIP, Arrays, Encode, ImageProcessor, Settings
from octavo.frontend.media.video import VideoInfo

Size = tuple[int, int]
"""(height, width)"""


class LlavaNextProcessor(ImageProcessor):
    """The squares' tokens stand row by row, each with one for its end; those of padding are left out."""

    DEFAULTS: ClassVar[Settings] = CLIP | {
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    }
    OPTIONS = ImageProcessor.OPTIONS | {"do_center_crop", "crop_size"}

    @staticmethod
    def prepare(image: Image.Image, settings: Settings) -> Arrays:
        size, crop, resample = settings["size"], settings.get("crop_size") or {}, settings["resample"]
        side = crop.get("height") or size.get("height") or size["shortest_edge"]
        whole = size.get("height") or size["shortest_edge"], size.get("width") or size.get("shortest_edge")
        height, width = best_grid((image.height, image.width), settings["image_grid_pinpoints"])
        canvas = Image.new("RGB", (width, height))
        inner = pixels.resized(image, *_fitted((image.height, image.width), (height, width)), resample)
        canvas.paste(inner, ((width - inner.width) // 2, (height - inner.height) // 2))
        corners = [(x, y) for y in range(0, height, side) for x in range(0, width, side)]
        frames = [pixels.resized(image, *whole, resample)]
        frames += [canvas.crop((x, y, min(x + side, width), min(y + side, height))) for x, y in corners]
        if settings.get("do_resize", True):
            frames = [pixels.resized(f, *pixels.wanted_size(f, size), resample) for f in frames]
        values = []
        for array in map(np.asarray, frames):
            if settings.get("do_center_crop"):
                array = pixels.center_crop(array, crop["height"], crop["width"])  # noqa: PLW2901
            values.append(pixels.normalised(array, settings))
        sizes = np.array([[image.height, image.width], [height // side, width // side]])
        return {"pixel_values": np.stack(values), "image_sizes": sizes[0], "grid": sizes[1]}

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        height, width = self.features(arrays)
        patches = arrays["pixel_values"].shape[-1] // self.config["vision_config"].get("patch_size", 14)
        return [self.placeholder_id] * (patches**2 + height * (width + 1))

    def features(self, arrays: Mapping[str, np.ndarray]) -> Size:
        """Return the rows and columns of patches that are left without the padding."""
        patches = arrays["pixel_values"].shape[-1] // self.config["vision_config"].get("patch_size", 14)
        rows, columns = arrays["grid"].tolist()
        original = (int(arrays["image_sizes"][0]), int(arrays["image_sizes"][1]))
        return without_padding(original, (rows * patches, columns * patches))


class OneVisionProcessor(LlavaNextProcessor):
    """OneVision shrinks what would be too many tokens."""

    DEFAULTS: ClassVar[Settings] = CLIP | {
        "size": {"height": 384, "width": 384},
        "image_grid_pinpoints": [[384 * y, 384 * x] for y in range(1, 7) for x in range(1, 7)],
    }
    VIDEO_DEFAULTS: ClassVar[Settings | None] = DEFAULTS

    def __init__(self, config: Settings, settings: Settings, encode: Encode) -> None:
        super().__init__(config, settings, encode)
        self.video_id = config.get("video_token_id", config.get("video_token_index", 151647))

    @staticmethod
    def prepare_video(frames: list[Image.Image], video: VideoInfo, settings: Settings) -> Arrays:
        """Return the frames, each as a square."""
        height, width = pixels.wanted_size(frames[0], settings["size"])
        squares = (pixels.resized(frame, height, width, settings["resample"]) for frame in frames)
        values = [pixels.normalised(np.asarray(square), settings) for square in squares]
        return {"pixel_values": np.stack(values)}

    def video_tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        """Return a token for each four patches, and one for the end."""
        num_frames, *_, side = arrays["pixel_values"].shape
        half = -(-side // self.config["vision_config"].get("patch_size", 14) // 2)
        assert self.video_id is not None
        return [self.video_id] * (num_frames * half**2 + 1)

    def features(self, arrays: Mapping[str, np.ndarray]) -> Size:
        height, width = super().features(arrays)
        patches = arrays["pixel_values"].shape[-1] // self.config["vision_config"].get("patch_size", 14)
        most = int(str(self.config.get("vision_aspect_ratio", "anyres_max_9")).removeprefix("anyres_max_"))
        ratio = sqrt(height * width / (most * patches**2))
        return (int(height // ratio), int(width // ratio)) if ratio > 1.1 else (height, width)


def best_grid(original: Size, grids: Sequence[Sequence[int]]) -> Size:
    """Return the grid that shows most of an image, and of those the one that wastes least."""

    def worth(grid: Sequence[int]) -> tuple[int, int]:
        scale = min(grid[1] / original[1], grid[0] / original[0])
        shown = min(int(original[1] * scale) * int(original[0] * scale), original[0] * original[1])
        return shown, shown - grid[0] * grid[1]

    height, width = max(grids, key=worth)
    return height, width


def without_padding(original: Size, grid: Size) -> Size:
    """Return how many rows and columns of patches are left of a grid that an image was fitted into."""
    height, width = grid
    if original[1] / original[0] > width / height:
        return height - (height - int(round(original[0] * (width / original[1]), 7))) // 2 * 2, width
    return height, width - (width - int(round(original[1] * (height / original[0]), 7))) // 2 * 2


def _fitted(original: Size, target: Size) -> Size:
    scale_height, scale_width = target[0] / original[0], target[1] / original[1]
    if scale_width < scale_height:
        return min(ceil(original[0] * scale_width), target[0]), target[1]
    return target[0], min(ceil(original[1] * scale_height), target[1])
