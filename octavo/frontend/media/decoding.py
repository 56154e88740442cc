"""A file becomes an RGB image, or an error with a text of ours: libraries' texts may tell addresses."""

import struct
import warnings
import zlib
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps

from octavo.base.errors import RequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Decoders of others (EPS runs programs) are never tried."""
_FAULTS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    TypeError,
    IndexError,
    KeyError,
    struct.error,
    zlib.error,
)


def decode(content: bytes, max_pixels: int) -> Image.Image:
    """Return the image, upright, its first frame, over white. Raises RequestError."""
    Image.MAX_IMAGE_PIXELS = None  # the check below is ours, and comes before any pixel is decoded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damage is told by errors
        return _decoded(content, max_pixels)


def _decoded(content: bytes, max_pixels: int) -> Image.Image:
    try:
        image = Image.open(BytesIO(content), formats=FORMATS)
        width, height = image.size
        if width * height > max_pixels:
            text = (
                f"The image has {width} x {height} pixels; at most max_image_pixels={max_pixels} are allowed."
            )
            raise RequestError(text, "image_url")
        image.load()
        return _over_white(ImageOps.exif_transpose(image))
    except RequestError:
        raise
    except MemoryError:
        raise RequestError("Failed to load image: it needs too much memory.", "image_url") from None
    except _FAULTS:
        raise RequestError(
            f"Failed to load image: the file is damaged, or none of {', '.join(FORMATS)}.", "image_url"
        ) from None


def _over_white(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if "A" in image.mode or "transparency" in image.info:
        with_alpha = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, with_alpha).convert("RGB")
    return image.convert("RGB")
