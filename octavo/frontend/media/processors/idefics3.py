"""Idefics3 and SmolVLM: an image is cut into squares, and a small copy of the whole follows them."""

from collections.abc import Mapping
from datetime import timedelta
from math import ceil
from typing import ClassVar

import numpy as np
from PIL import Image

from octavo.frontend.media import pixels
from octavo.frontend.media.processors.interface import HALF, LANCZOS, Arrays, Encode, ImageProcessor, Settings
from octavo.frontend.media.video import VideoInfo

_MAX_SIDE = 4096
_FAKE, _GLOBAL, _IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"


class Idefics3Processor(ImageProcessor):
    """The text around the squares says where each is."""

    DEFAULTS: ClassVar[Settings] = HALF | {
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "do_image_splitting": True,
        "resample": LANCZOS,
    }
    OPTIONS = ImageProcessor.OPTIONS | {"do_image_splitting", "max_image_size"}

    @staticmethod
    def prepare(image: Image.Image, settings: Settings) -> Arrays:
        side, resample = settings["max_image_size"]["longest_edge"], settings["resample"]
        if settings.get("do_resize", True):
            image = pixels.resized(image, *_wanted_size(image, settings["size"]), resample)
        rows = columns = 0
        frames = [image]
        if settings["do_image_splitting"]:
            image = pixels.resized(image, *_in_squares(image, side), resample)
            if max(image.size) > side:
                rows, columns = image.height // side, image.width // side
            corners = [(x * side, y * side) for y in range(rows) for x in range(columns)]
            frames = [image.crop((x, y, x + side, y + side)) for x, y in corners]
            frames.append(pixels.resized(image, side, side, resample) if rows else image)
        else:
            frames = [pixels.resized(image, side, side, resample)]
        values = np.stack([np.asarray(frame) for frame in frames]).transpose(0, 3, 1, 2)
        return {
            "pixel_values": np.ascontiguousarray(values),
            "levels": pixels.levels(settings),
            "grid": np.array([rows, columns]),
        }

    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        squares = self._square(arrays)
        rows, columns = arrays["grid"].tolist()
        text = "".join(
            "".join(f"{_FAKE}<row_{y + 1}_col_{x + 1}>{squares}" for x in range(columns)) + "\n"
            for y in range(rows)
        )
        text += "\n" if rows else ""
        return self.encode(f"{text}{_FAKE}{_GLOBAL}{squares}{_FAKE}")

    def _square(self, arrays: Mapping[str, np.ndarray]) -> str:
        patch = self.config["vision_config"].get("patch_size", 32)
        side: int = arrays["pixel_values"].shape[-1] // patch // self.config.get("scale_factor", 2)
        return _IMAGE * side**2


def _wanted_size(image: Image.Image, size: Mapping[str, int]) -> tuple[int, int]:
    """Return (height, width) with the longer one as asked for, and the shorter one even."""
    if "longest_edge" not in size:
        return size["height"], size["width"]
    longest, ratio = size["longest_edge"], image.width / image.height
    if image.width >= image.height:
        height, width = int(longest / ratio), longest
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _MAX_SIDE:
        height, width = int(_MAX_SIDE / ratio), _MAX_SIDE
    elif height > width and height > _MAX_SIDE:
        height, width = _MAX_SIDE, int(_MAX_SIDE * ratio)
    return max(height, 1), max(width, 1)


def _in_squares(image: Image.Image, side: int) -> tuple[int, int]:
    """Return (height, width) as multiples of `side`."""
    ratio = image.width / image.height
    if image.width >= image.height:
        width = ceil(image.width / side) * side
        return ceil(int(width / ratio) / side) * side, width
    height = ceil(image.height / side) * side
    return height, ceil(int(height * ratio) / side) * side


class SmolVLMProcessor(Idefics3Processor):
    """Takes videos, too: frames that are not cut, each behind its time."""

    VIDEO_DEFAULTS: ClassVar[Settings | None] = Idefics3Processor.DEFAULTS

    def __init__(self, config: Settings, settings: Settings, encode: Encode) -> None:
        super().__init__(config, settings, encode)
        self.video_id = self.token_of("<video>")

    def read_video_settings(self, settings: Settings) -> None:
        """See ImageProcessor; files on hubs say how large frames are under `video_sampling`."""
        size = (settings.get("video_sampling") or {}).get("video_size")
        super().read_video_settings({**settings, **({"size": size} if size else {})})

    @staticmethod
    def prepare_video(frames: list[Image.Image], video: VideoInfo, settings: Settings) -> Arrays:
        """Return the frames as squares, their times and how long the video is, in seconds."""
        squares = (SmolVLMProcessor.prepare(f, {**settings, "do_image_splitting": False}) for f in frames)
        times = [index / video.fps for index in video.indices]
        return {
            "pixel_values": np.concatenate([square["pixel_values"] for square in squares]),
            "levels": pixels.levels(settings),
            "times": np.array(times),
            "length": np.array([video.num_frames / video.fps]),
        }

    def video_tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        frame = f"{_FAKE}{_GLOBAL}{self._square(arrays)}{_FAKE}"
        times = [divmod(int(time), 60) for time in arrays["times"].tolist()]
        told = "".join(f"\nFrame from {minutes:02d}:{seconds:02d}:{frame}" for minutes, seconds in times)
        length = timedelta(seconds=int(arrays["length"][0]))
        intro = f"the following series of {_words(len(times))} frames from a {length} [H:MM:SS] video."
        return self.encode(f"You are provided {intro}\n{told}\n\n")

    def placeholder(self, modality: str) -> int:
        return self.placeholder_id


_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


def _words(number: int) -> str:
    """Return a number below a million in English words, as num2words writes it."""
    small, tens = _SMALL.split(), _TENS.split()
    if number < 20:
        return small[number]
    if number < 100:
        ten, rest = divmod(number, 10)
        return tens[ten - 2] + (f"-{small[rest]}" if rest else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    count, rest = divmod(number, unit)
    joint = "" if not rest else f" and {_words(rest)}" if rest < 100 else f", {_words(rest)}"
    return f"{_words(count)} {name}{joint}"
