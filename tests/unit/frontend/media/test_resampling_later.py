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
    [((60, 90), (84, 112)), ((97, 33), (97, 28)), ((50, 160), (56, 84)), ((7, 5), (28, 28))],
)
def test_bits_are_pillows(have, wanted):
    source = noise(*have)
    rows, columns = (torch.from_numpy(pixels.taps(*pair)) for pair in zip(have, wanted, strict=True))
    ours = resampled(resampled(torch.from_numpy(source), columns, 1), rows, 0).numpy()
    theirs = Image.fromarray(source).resize(wanted[::-1], Image.Resampling.BICUBIC)
    assert (ours == np.asarray(theirs)).all()
    other = resampled(resampled(torch.from_numpy(source), rows, 0), columns, 1).numpy()
    assert have[0] == wanted[0] or (ours != other).any(), "the order does not show"


@pytest.mark.parametrize("architecture", QWENS)
def test_the_encoder_sees_the_same_pixels(architecture, monkeypatch):
    """A picture that becomes lower is resampled by Pillow as before."""
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
            made = {name: torch.from_numpy(each) for name, each in prepare(image, processor.settings).items()}
            expected = prepare(image, plain)["pixel_values"]
            assert (encoder.pixels(made)["pixel_values"].numpy() == expected).all()
        requests = make_requests(architecture)
        outputs = llm.generate(requests, PARAMS, use_tqdm=False)
    assert max(differences(architecture, requests, outputs)) <= TOLERANCE
    assert set(kinds) == {True, False}
