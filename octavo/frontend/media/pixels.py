"""Operations on images that processors are made of: Pillow and NumPy, with transformers' arithmetic.

Sources: PilBackend and image_transforms of transformers 5, to the last bit; the resampling is Pillow's own.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import repeat
from math import ceil
from typing import Any

import numpy as np
from PIL import Image

Pixels = np.ndarray
"""[H, W, 3] uint8."""
_MANY, _NUM_BANDS = 1 << 19, 4
"""Pixels from which an image is resampled by threads, and how many these are."""


def rgb(image: Image.Image) -> Image.Image:
    """Return the image in three channels, as transformers converts it."""
    return image if image.mode == "RGB" else image.convert("RGB")


def resized(image: Image.Image, height: int, width: int, resample: int) -> Image.Image:
    """Resample the image to a size; a large one by threads, in bands of rows and of columns."""
    if image.width * image.height < _MANY or image.mode != "RGB":
        return image.resize((width, height), resample=Image.Resampling(resample))
    is_height_first = changes_height_first(image, height, width)
    with ThreadPoolExecutor(_NUM_BANDS) as threads:
        for is_row in (not is_height_first, is_height_first):
            whole = Image.new(image.mode, (width, image.height) if is_row else (image.width, height))
            edges = (
                np.linspace(0, whole.height if is_row else whole.width, _NUM_BANDS + 1).astype(int).tolist()
            )

            def band(first: int, last: int, source: Image.Image, is_row: bool) -> Image.Image:
                box = (0, first, source.width, last) if is_row else (first, 0, last, source.height)
                size = (width, last - first) if is_row else (last - first, height)
                return source.crop(box).resize(size, Image.Resampling(resample))

            made = threads.map(band, edges, edges[1:], repeat(image), repeat(is_row))
            for edge, part in zip(edges, made, strict=False):
                whole.paste(part, (0, edge) if is_row else (edge, 0))
            image = whole
    return image


def changes_height_first(image: Image.Image, height: int, width: int) -> bool:
    """Return whether Pillow changes the height before the width, between which it rounds."""
    falls = image.height - height
    return falls > max(0, 2 * (image.width - width)) and _chooses_order()


@cache
def _chooses_order() -> bool:
    """Return whether this Pillow does so if the height falls by more than twice as much (13); else never."""
    probe, resample = np.random.default_rng(0).integers(0, 256, (64, 16), np.uint8), Image.Resampling.BICUBIC
    image = Image.fromarray(probe)
    lower = image.resize((16, 8), resample).resize((12, 8), resample)
    return image.resize((12, 8), resample).tobytes() == lower.tobytes()


def taps(length: int, wanted: int) -> np.ndarray:
    """Return how Pillow makes `wanted` pixels of a line of them, bicubic: [wanted, 1 + K] int32.

    The first pixel that each sees, and the weights of K, in 1 / 2^22; beyond the line they are 0.
    """
    scale = length / wanted
    stretch = max(scale, 1.0)
    centers = (np.arange(wanted) + 0.5) * scale
    first = np.maximum((centers - 2 * stretch + 0.5).astype(int), 0)
    last = np.minimum((centers + 2 * stretch + 0.5).astype(int), length)
    places = first[:, None] + np.arange((last - first).max())
    x = np.abs((places - centers[:, None] + 0.5) * (1 / stretch))
    near, far = (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    weights = np.where(x < 1, near, np.where(x < 2, far, 0.0)) * (places < last[:, None])
    weights = weights / weights.cumsum(axis=1)[:, -1:] * (1 << 22)
    return np.column_stack([first, np.trunc(weights + np.copysign(0.5, weights))]).astype(np.int32)


def size_of_shortest_edge(image: Image.Image, shortest: int) -> tuple[int, int]:
    """Return (height, width) with the smaller one of a length, and the same proportions."""
    short, long = sorted(image.size)
    new_long = int(shortest * long / short)
    return (new_long, shortest) if image.width <= image.height else (shortest, new_long)


def wanted_size(image: Image.Image, size: Mapping[str, int]) -> tuple[int, int]:
    """Return the (height, width) that a processor's `size` asks for."""
    if "shortest_edge" in size:
        return size_of_shortest_edge(image, size["shortest_edge"])
    return size["height"], size["width"]


def center_crop(pixels: Pixels, height: int, width: int) -> Pixels:
    """Cut the middle out of an image; black surrounds one that is smaller."""
    rows, columns = (max(length, have) for length, have in zip((height, width), pixels.shape, strict=False))
    top, left = ceil((rows - pixels.shape[0]) / 2), ceil((columns - pixels.shape[1]) / 2)
    if (rows, columns) != pixels.shape[:2]:
        whole = np.zeros((rows, columns, 3), pixels.dtype)
        whole[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
        start_y, start_x = (pixels.shape[0] - height) // 2 + top, (pixels.shape[1] - width) // 2 + left
        return whole[max(0, start_y) :][:height, max(0, start_x) :][:, :width]
    top, left = (rows - height) // 2, (columns - width) // 2
    return pixels[top : top + height, left : left + width]


def normalised(pixels: Pixels, settings: Mapping[str, Any]) -> np.ndarray:
    """Return [3, H, W] float32: rescaled and normalised as `settings` say."""
    table = levels(settings)
    return np.stack([table[channel][pixels[..., channel]] for channel in range(3)])


def levels(settings: Mapping[str, Any]) -> np.ndarray:
    """Return what the values of a pixel become, [3, 256] float32: rescaled and normalised.

    Beside `pixel_values` of uint8, whose second axis is that of channels, the worker looks them up.
    """
    values = np.arange(256, dtype=np.float64)
    if settings.get("do_rescale", True):
        values = values * settings.get("rescale_factor", 1 / 255)
    table = np.repeat(values.astype(np.float32)[None], 3, axis=0)
    if settings.get("do_normalize", True):
        given = (np.array(settings[name], np.float32) for name in ("image_mean", "image_std"))
        mean, std = (values.reshape(-1, 1) for values in given)
        table = (table - mean) / std
    return table
