"""Videos, given embeddings, options of the processor and counts of tokens through a whole server."""

import base64
import re

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import save as save_tensors

from tests.integration.test_images_over_http import chat, data_url, picture, serve, text
from tests.tiny_media import make_images, make_oracle, make_video, save

QWEN = "Qwen2_5_VLForConditionalGeneration"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    folder = save(make_oracle(QWEN), QWEN, tmp_path_factory.mktemp("qwen"))
    options = {"enable_mm_embeds": True, "max_video_frames": 8, "allow_private_media_hosts": True}
    async with serve(folder, media_io_kwargs={"video": {"num_frames": 4}}, **options) as client:
        yield client


def film(content, **more):
    url = f"data:video/mp4;base64,{base64.b64encode(content).decode()}"
    return {"type": "video_url", "video_url": {"url": url}, **more}


async def test_videos_and_images_are_counted(server):
    """Squares of four patches; a pair of frames is one time."""
    [image] = make_images(1)
    parts = text("5 6"), film(make_video(size=(56, 42))), picture(data_url(image)), text("7")
    answer = await chat(server, *parts)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    details = usage["prompt_tokens_details"]
    assert details["video_tokens"] == 2 * 4 * 3
    page = (await server.get("/metrics")).text
    for modality in ("image", "video"):
        told = re.search(rf'vllm:mm_prompt_tokens_total{{.*modality="{modality}".*}} (\d+)', page)
        assert int(told[1]) >= details[f"{modality}_tokens"]
    assert int(re.search(r"vllm:mm_preprocessing_seconds_count{.*} (\d+)", page)[1]) >= 2
    assert usage["prompt_tokens"] == details["video_tokens"] + details["image_tokens"] + 3
    assert (await server.get("/v1/models")).json()["data"][0]["input_modalities"] == [
        "text",
        "image",
        "video",
    ]


@pytest.mark.parametrize(
    "more", [{"media_io_kwargs": {"video": {"num_frames": 8}}}, {"mm_processor_kwargs": {"num_frames": 8}}]
)
async def test_a_request_says_how_many_frames(server, more):
    answer = await chat(server, film(make_video(size=(56, 42))), text("7"), **more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"]["video_tokens"] == 4 * 4 * 3


async def test_options_of_the_processor(server):
    [image] = make_images(1)
    counts = [
        (await chat(server, picture(data_url(image)), text("5"), mm_processor_kwargs=kwargs)).json()["usage"]
        for kwargs in ({}, {"max_pixels": 28 * 28})
    ]
    assert counts[1]["prompt_tokens"] < counts[0]["prompt_tokens"]
    answer = await chat(server, picture(data_url(image)), text("5"), mm_processor_kwargs={"smell": 1})
    assert answer.status_code == 400 and "Unknown mm_processor_kwargs smell" in answer.text


async def test_given_embeddings(server):
    """A file of a tensor, with the grid of patches."""
    numbers = np.random.default_rng(0).normal(size=(6, 48)).astype(np.float32)
    file = base64.b64encode(save_tensors({"x": numbers})).decode()
    parts = {"image_embeds": file, "image_grid_thw": [1, 4, 6]}
    answer = (await chat(server, {"type": "image_embeds", "image_embeds": parts}, text("5"))).json()
    assert answer["usage"]["prompt_tokens"] == 7
    for wrong, said in (
        (file, "need their grid"),
        ({"image_embeds": file, "image_grid_thw": [1, 4, 4]}, "need their grid"),
        ({"image_embeds": "AAAA", "image_grid_thw": [1, 4, 6]}, "image_embeds must be base64"),
    ):
        answer = await chat(server, {"type": "image_embeds", "image_embeds": wrong}, text("5"))
        assert answer.status_code == 400 and said in answer.text


async def test_what_cannot_be_fetched_or_read(server):
    answer = await chat(server, picture("http://127.0.0.1:1/a.png"), text("5"))
    assert answer.status_code == 422 and "Failed to fetch media from URL" in answer.text
    assert answer.json()["error"]["param"] == "image_url"
    answer = await chat(server, film(b"no video"), text("5"))
    assert answer.status_code == 400 and "Failed to load video" in answer.text
    assert answer.json()["error"]["param"] == "video_url"
    answer = await chat(server, film(make_video()), text("5"), media_io_kwargs={"video": {"num_frames": -1}})
    assert answer.status_code == 400 and "max_video_frames=8" in answer.text
    answer = await chat(server, film(make_video()), text("5"))
    assert answer.status_code == 200
