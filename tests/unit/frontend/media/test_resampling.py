"""Large images are resampled in bands on threads: not a pixel differs from Pillow's."""

import numpy as np
import pytest
from PIL import Image

from octavo.frontend.media import pixels


@pytest.mark.parametrize("resample", [1, 2, 3])
@pytest.mark.parametrize(
    "size", [(1036, 1036), (770, 1500), (2048, 700), (700, 333), (768, 1500), (300, 900), (100, 90)]
)
def test_bands(size, resample):
    noise = np.random.default_rng(resample).integers(0, 256, (770, 1024, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    expected = image.resize(size[::-1], Image.Resampling(resample))
    np.testing.assert_array_equal(pixels.resized(image, *size, resample), expected)
