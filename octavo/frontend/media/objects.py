"""What Python callers give for an image becomes one of Pillow's."""

from typing import Any

import numpy as np
from PIL import Image

from octavo.base.errors import RequestError
from octavo.frontend.media import pixels


def to_image(value: Any) -> Image.Image:
    """Return an image of Pillow's, an array or a tensor of uint8, in RGB. Raises RequestError."""
    if isinstance(value, Image.Image):
        return pixels.rgb(value)
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if array.ndim == 3 and array.shape[0] == 3 and array.shape[-1] != 3:
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 2:
        array = np.repeat(array[..., None], 3, axis=-1)
    if array.ndim != 3 or array.shape[-1] != 3 or array.dtype != np.uint8 or not array.size:
        got = f"{type(value).__name__} {getattr(value, 'shape', '')} {getattr(value, 'dtype', '')}".rstrip()
        raise RequestError(
            "An image must be one of Pillow's, the bytes of a file, or an array of uint8 of shape (H, W, 3) "
            f"or (3, H, W); got {got}.",
            "multi_modal_data",
        )
    return Image.fromarray(np.ascontiguousarray(array))
