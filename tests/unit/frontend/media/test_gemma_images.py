"""Gemma 3's images: parts of long ones as transformers cuts them, and lines that follow each other."""

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from octavo.frontend.media.placement import Prepared, place_items
from octavo.frontend.media.processors.gemma3 import Gemma3Processor

LINES = {"\n": 1, "\n\n": 2, "\n\n\n": 3, "\n\n\n\n": 4, "\n" * 6: 6}
CONFIG = {"image_token_index": 120, "boi_token_index": 117, "eoi_token_index": 118, "mm_tokens_per_image": 4}
SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 20,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def encode(text):
    """Lines by their number, all else by its words."""
    return [LINES[text]] if text in LINES else [9] * len(text.split())


def processor(**settings):
    return Gemma3Processor({**CONFIG, "vision_config": {}}, settings, encode)


@pytest.mark.parametrize("size", [(90, 40), (40, 95), (50, 50), (100, 18), (61, 50), (130, 30)])
def test_parts_are_those_of_transformers(size):
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image, asked = Image.fromarray(noise), {"size": {"height": 28, "width": 28}, **SCAN}
    ours = Gemma3Processor.prepare(image, processor(**asked).settings)["pixel_values"]
    theirs = Gemma3ImageProcessorPil(**asked)([image], return_tensors="np")
    assert len(ours) == 1 + theirs["num_crops"][0]
    np.testing.assert_array_equal(ours, theirs["pixel_values"])


def placed(ids, *arrays):
    made = processor()
    items = [Prepared("image", b"k", made.tokens({"pixel_values": array}), {}) for array in arrays]
    return place_items(made, ids, items, 99)


def test_lines_around_images_are_one_token():
    one = np.zeros((1, 3, 4, 4))
    ids, items = placed([5, 1, 117, 1, 6, 117, 117, 7], one, one, one)
    image = [117, 120, 120, 120, 120, 118]
    assert ids == [5, 3, *image, 3, 6, 2, *image, 4, *image, 2, 7]
    for item in items:
        assert ids[item.start : item.end].count(120) == 4


def test_parts_are_told_of():
    ids, [item] = placed([117], np.zeros((3, 3, 4, 4)))
    assert ids.count(117) == ids.count(118) == 3 and ids.count(9) == 5 + 10
    assert item.sees_itself
