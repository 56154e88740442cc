"""Thousands of pictures, and huge ones, on a quiet machine: OCTAVO_MEDIA_SOAK=1 selects these."""

import asyncio
import gc
import resource
import time

import numpy as np
import psutil
import pytest
from PIL import Image

from octavo import LLM, SamplingParams
from tests.integration.test_images_over_http import LLAVA, chat, picture, serve, text
from tests.tiny_media import IMAGE, make_oracle, save

pytestmark = pytest.mark.opt_in("OCTAVO_MEDIA_SOAK")
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(make_oracle(LLAVA), LLAVA, tmp_path_factory.mktemp("llava"))


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


def test_memory_stays_flat(folder):
    """Behind the first 500 of 2,000 different pictures, with caches that are full by then."""
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    rng, sizes = np.random.default_rng(0), []
    caches = {"mm_processor_cache_gb": 0.01, "mm_encoder_cache_gb": 0.001}
    with LLM(str(folder), max_model_len=256, **caches) as llm:
        for _ in range(40):
            images = [rng.integers(0, 256, (200, 240, 3), dtype=np.uint8) for _ in range(50)]
            asked = [
                {"prompt_token_ids": [5, IMAGE, 6], "multi_modal_data": {"image": Image.fromarray(image)}}
                for image in images
            ]
            outputs = llm.generate(asked, params, use_tqdm=False)
            assert all(output.outputs[0].token_ids for output in outputs)
            sizes.append(resident())
    print(f"resident: {sizes[9] // MIB} MiB behind 500, {sizes[-1] // MIB} MiB behind 2,000")
    assert sizes[-1] - sizes[9] < 50 * MIB


@pytest.mark.asyncio
async def test_the_loop_is_never_held(tmp_path, folder):
    """While a picture of 100 megapixels is decoded and resized in another process."""
    tile = np.random.default_rng(0).integers(0, 256, (500, 500, 3), dtype=np.uint8)
    Image.fromarray(np.tile(tile, (20, 20, 1))).save(tmp_path / "large.png", compress_level=1)
    async with serve(folder, allowed_local_media_path=str(tmp_path)) as client:
        await chat(client, text("5"))
        asked = asyncio.create_task(chat(client, picture(f"file://{tmp_path}/large.png"), text("5")))
        gaps, last = [], time.monotonic()
        while not asked.done():
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        answer = await asked
    assert answer.status_code == 200, answer.text
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"longest gap: {1000 * max(gaps):.1f} ms; at most {peak:.0f} MiB here")
    assert max(gaps) < 0.02
