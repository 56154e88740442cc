"""Qwen2-VL, 2.5-VL and 3-VL: an image keeps its proportions; squares of four patches are a token."""

from collections.abc import Mapping
from math import ceil, floor, sqrt
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from octavo.base.errors import RequestError
from octavo.frontend.media import pixels
from octavo.frontend.media.processors.interface import CLIP, HALF, Arrays, Encode, ImageProcessor, Settings
from octavo.frontend.media.processors.media import MediaProcessor
from octavo.frontend.media.video import VideoInfo

_LIMITS = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
_MOST_SECONDS = 3600
"""Between pairs of frames."""


class Qwen2VLProcessor(ImageProcessor):
    """The number of pixels decides on the size."""

    DEFAULTS: ClassVar[Settings] = CLIP | {
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    VIDEO_DEFAULTS: ClassVar[Settings | None] = {
        **DEFAULTS,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    }
    OPTIONS = ImageProcessor.OPTIONS | {"min_pixels", "max_pixels"}

    def __init__(self, config: Settings, settings: Settings, encode: Encode) -> None:
        super().__init__(config, self._read(config, settings), encode)
        self.settings = with_limits(self.settings)
        self.video_id = config.get("video_token_id", config.get("video_token_index", 151656))

    def read_video_settings(self, settings: Settings) -> None:
        own = {**(self.VIDEO_DEFAULTS or {}), **self._read(self.config, settings)}
        self.video_settings = with_limits(own)

    @classmethod
    def _read(cls, config: Settings, settings: Settings) -> Settings:
        """Return the settings; of sizes that they leave out, those of the tower."""
        sizes = {name: value for name, value in config["vision_config"].items() if name in cls.DEFAULTS}
        return sizes | {name: value for name, value in settings.items() if value is not None}

    @staticmethod
    def prepare(image: Image.Image, settings: Settings) -> Arrays:
        settings = with_limits(settings)
        side = settings["patch_size"] * settings["merge_size"]
        height, width = smart_size(image.height, image.width, side, settings["size"])
        if not _may_wait(image, settings, height, width):
            return patches_of([image], settings, (height, width))
        lines = {"rows": pixels.taps(image.height, height), "columns": pixels.taps(image.width, width)}
        lines["is_height_first"] = np.array([int(pixels.changes_height_first(image, height, width))])
        grid = np.array([1, height // settings["patch_size"], width // settings["patch_size"]])
        return {"picture": np.asarray(image), **lines, "levels": pixels.levels(settings), "grid_thw": grid}

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        return self.tokens_of_embeds(int(arrays["grid_thw"].prod()) // self.settings["merge_size"] ** 2)

    def read_embeds(self, modality: str, count: int, told: Settings) -> tuple[list[int], Arrays]:
        """See MediaProcessor: {"image_grid_thw": [1, rows, columns]} of patches."""
        if modality == "audio":
            return super().read_embeds(modality, count, told)
        name = f"{modality}_grid_thw"
        merge = self.settings["merge_size"]
        grid = _numbers(told.get(name), np.int64)
        is_whole = len(grid) == 3 and (grid > 0).all() and not (grid[1:] % merge).any()
        if not is_whole or grid.prod() != count * merge**2:
            raise RequestError(
                f"Embeddings of this model's {modality}s need their grid: "
                f'{{"{modality}_embeds": …, "{name}": [times, rows, columns]}} of its patches.',
                "multi_modal_data",
            )
        arrays = {"grid_thw": grid}
        seconds = _numbers(told.get("second_per_grid_ts"), np.float64)[:1]
        if modality == "video" and len(seconds) and 0 <= seconds[0] < _MOST_SECONDS:
            arrays["seconds"] = seconds
        return [self.placeholder(modality)] * count, arrays

    @staticmethod
    def prepare_video(frames: list[Image.Image], video: VideoInfo, settings: Settings) -> Arrays:
        """Return patches, and the seconds between pairs of frames."""
        settings = with_limits(settings)
        side, pair = settings["patch_size"] * settings["merge_size"], settings["temporal_patch_size"]
        size = smart_size(frames[0].height, frames[0].width, side, settings["size"])
        return patches_of(frames, settings, size) | {"seconds": np.array([pair / video.sampled_fps])}

    def video_tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        assert self.video_id is not None
        return [self.video_id] * (int(arrays["grid_thw"].prod()) // self.settings["merge_size"] ** 2)


class ColQwen2Processor(Qwen2VLProcessor):
    """Sees pages, no videos."""

    VIDEO_DEFAULTS: ClassVar[Settings | None] = None

    def __init__(self, config: Settings, settings: Settings, encode: Encode) -> None:
        super().__init__(config, settings, encode)
        self.video_id = None


class Qwen3VLProcessor(Qwen2VLProcessor):
    """Frames share the pixels that a video may have; the time of each pair stands before it, as text."""

    VIDEO_DEFAULTS: ClassVar[Settings | None] = {
        **Qwen2VLProcessor.DEFAULTS,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        **HALF,
    }

    def __init__(self, config: Settings, settings: Settings, encode: Encode) -> None:
        super().__init__(config, settings, encode)
        names = ("vision_start_token_id", "vision_end_token_id")
        self.video_frame = config.get(names[0], 151652), config.get(names[1], 151653)

    def read_embeds(self, modality: str, count: int, told: Settings) -> tuple[list[int], Arrays]:
        """See MediaProcessor: the times of frames are not among what is told."""
        if modality == "video":
            return MediaProcessor.read_embeds(self, modality, count, told)
        return super().read_embeds(modality, count, told)

    @staticmethod
    def prepare_video(frames: list[Image.Image], video: VideoInfo, settings: Settings) -> Arrays:
        """Return patches, and the time of each pair of frames in seconds."""
        settings = with_limits(settings)
        pair, factor = settings["temporal_patch_size"], settings["patch_size"] * settings["merge_size"]
        height, width, count = frames[0].height, frames[0].width, len(frames)
        if (scale := factor / min(height, width)) > 1:
            height, width = int(height * scale), int(width * scale)
        size = smart_size(height, width, factor, settings["size"], count, round(count / pair) * pair)
        seconds = [index / video.fps for index in video.indices]
        seconds += seconds[-1:] * (-len(seconds) % pair)
        times = [(seconds[i] + seconds[i + pair - 1]) / 2 for i in range(0, len(seconds), pair)]
        return patches_of(frames, settings, size) | {"times": np.array(times)}

    def video_tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        assert self.video_id is not None and self.video_frame is not None
        first, last = self.video_frame
        each = int(arrays["grid_thw"][1:].prod()) // self.settings["merge_size"] ** 2
        frame = [first, *[self.video_id] * each, last]
        times = arrays["times"].tolist()
        return [token for time in times for token in (*self.encode(f"<{time:.1f} seconds>"), *frame)]


def _numbers(given: Any, dtype: Any) -> np.ndarray:
    """Return what a caller gives as a vector; an empty one for what is none."""
    try:
        return np.asarray(() if given is None else given, dtype).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        return np.zeros(0, dtype)


def with_limits(settings: Settings) -> dict[str, Any]:
    """Return settings whose `size` takes over `min_pixels` and `max_pixels`, as transformers reads them."""
    size = {name: settings.get(limit) or settings["size"][name] for name, limit in _LIMITS.items()}
    return {name: value for name, value in settings.items() if name not in _LIMITS.values()} | {"size": size}


def _may_wait(image: Image.Image, settings: Settings, height: int, width: int) -> bool:
    """Whether the GPU may resample: not much more than it then keeps."""
    is_bicubic = settings.get("do_resize", True) and settings["resample"] == Image.Resampling.BICUBIC
    is_small = image.mode == "RGB" and image.width * image.height <= 4 * width * height
    return bool(settings.get("resamples_later") and is_bicubic and is_small)


def patches_of(frames: list[Image.Image], settings: Settings, size: tuple[int, ...]) -> Arrays:
    """Return the patches of pairs of frames, [P, 3, pair * side * side] uint8, square by square; what an
    image shows twice is there once. size: (height, width)
    """
    side, merge, pair = settings["patch_size"], settings["merge_size"], settings["temporal_patch_size"]
    if settings.get("do_resize", True):
        height, width = size
        frames = [pixels.resized(frame, height, width, settings["resample"]) for frame in frames]
    pair = pair if len(frames) > 1 else 1
    values = np.stack([np.asarray(frame) for frame in (*frames, *frames[-1:] * (-len(frames) % pair))])
    times, rows, columns = len(values) // pair, values.shape[1] // side, values.shape[2] // side
    shape = times, pair, rows // merge, merge, side, columns // merge, merge, side, 3
    patches = values.reshape(shape).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    grid, table = np.array([times, rows, columns]), pixels.levels(settings)
    return {"pixel_values": patches.reshape(times * rows * columns, 3, -1), "levels": table, "grid_thw": grid}


def smart_size(
    height: int, width: int, factor: int, size: Settings, count: int = 1, rounded: int = 1
) -> tuple[int, ...]:
    """Return multiples of `factor` of nearly the same proportions, whose product lies within the limits.

    count, rounded: so many frames share these, as counted and as rounded. Raises ValueError.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"absolute aspect ratio must be smaller than 200, got {width} x {height} pixels")
    fewest, most = size["shortest_edge"], size["longest_edge"]
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rounded * rows * columns > most:
        by = sqrt(count * height * width / most)
        return tuple(max(factor, floor(length / by / factor) * factor) for length in (height, width))
    if rounded * rows * columns < fewest:
        by = sqrt(fewest / (count * height * width))
        return tuple(ceil(length * by / factor) * factor for length in (height, width))
    return rows, columns
