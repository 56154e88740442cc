"""Pictures that a GPU resamples: the worker's pixels are Pillow's and transformers', to the last bit."""

import numpy as np
import pytest
import torch
from PIL import Image

from octavo.frontend.media import pixels
from octavo.frontend.media.processors.qwen_vl import Qwen2VLProcessor
from octavo.frontend.media.reader import MediaReader
from octavo.runtime.models.vision import resampled
from tests.parity.test_media_models import PARAMS, TOLERANCE, differences, make_llm, make_requests

QWENS = [f"{name}ForConditionalGeneration" for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")]


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize(
    ("have", "wanted"),
    [
        ((60, 90), (84, 112)),
        ((97, 33), (97, 28)),
        ((50, 160), (56, 84)),
        ((7, 5), (28, 28)),
        ((200, 90), (84, 112)),
        ((80, 100), (60, 91)),
        ((80, 100), (60, 89)),
    ],
)
def test_bits_are_pillows(have, wanted):
    """In Pillow's order; the last two are at the edge between one and the other."""
    source = noise(*have)
    image = Image.fromarray(source)
    rows, columns = (torch.from_numpy(pixels.taps(*pair)) for pair in zip(have, wanted, strict=True))
    width_first = resampled(resampled(torch.from_numpy(source), columns, 1), rows, 0).numpy()
    height_first = resampled(resampled(torch.from_numpy(source), rows, 0), columns, 1).numpy()
    theirs = np.asarray(image.resize(wanted[::-1], Image.Resampling.BICUBIC))
    is_height_first = pixels.changes_height_first(image, *wanted)
    ours, other = (height_first, width_first) if is_height_first else (width_first, height_first)
    assert (ours == theirs).all()
    assert have[0] == wanted[0] or (ours != other).any(), "the order does not show"


def test_an_older_pillow(monkeypatch):
    """It changes the width first, always; what the installed one does is looked at."""
    image, resize = Image.fromarray(noise(200, 90)), Image.Image.resize

    def in_two(image, size, resample):
        return resize(resize(image, (size[0], image.height), resample), size, resample)

    pixels._chooses_order.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "resize", in_two)
        assert not pixels.changes_height_first(image, 84, 112)
    pixels._chooses_order.cache_clear()


@pytest.mark.parametrize("architecture", QWENS)
def test_the_encoder_sees_the_same_pixels(architecture, monkeypatch):
    """Pictures become higher and lower; of a much larger one Pillow makes less before it is sent."""
    init, prepare, kinds = MediaReader.__init__, Qwen2VLProcessor.prepare, []

    def on_gpu(reader, *arguments):
        init(reader, *arguments)
        reader.processor.settings = {**reader.processor.settings, "resamples_later": True}

    def noted(image, settings):
        made = prepare(image, settings)
        kinds.append("picture" in made)
        return made

    monkeypatch.setattr(MediaReader, "__init__", on_gpu)
    monkeypatch.setattr(Qwen2VLProcessor, "prepare", staticmethod(noted))
    with make_llm(architecture) as llm:
        encoder = llm.llm_engine.core.client._core._executor._worker.model.media_encoder
        processor = llm.llm_engine.input_processor.media.reader.processor
        plain = {**processor.settings, "resamples_later": False}
        for seed in range(4):
            image = Image.fromarray(noise(60 + 9 * seed, 100 - 7 * seed, seed))
            read = prepare(image, processor.settings)
            made = {name: torch.from_numpy(each.copy()) for name, each in read.items()}
            expected = prepare(image, plain)["pixel_values"]
            assert (encoder.pixels(made)["pixel_values"].numpy() == expected).all()
        requests = make_requests(architecture)
        requests[0]["multi_modal_data"]["image"] = [Image.fromarray(noise(400, 300))]
        outputs = llm.generate(requests, PARAMS, use_tqdm=False)
    assert max(differences(architecture, requests, outputs)) <= TOLERANCE
    assert set(kinds) == {True, False}
