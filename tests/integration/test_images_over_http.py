"""Images through a whole server: chat, Responses, Anthropic's messages, and what must disturb nobody."""

import asyncio
import base64
import io
import time
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from octavo import AsyncLLM, EngineArgs
from octavo.config.server import ServerConfig
from octavo.serving.app import make_app
from tests.tiny_media import IMAGE, make_images, make_oracle, save

LLAVA = "LlavaForConditionalGeneration"


@asynccontextmanager
async def serve(folder, **options):
    engine = AsyncLLM.from_engine_args(EngineArgs(model=str(folder), **{"max_model_len": 512} | options))
    await engine.start()
    app = make_app(engine, ServerConfig(enable_prompt_tokens_details=True))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo", timeout=60) as client:
            client.engine = engine
            yield client
    finally:
        app.state.background.end()
        await engine.shutdown()
        await app.state.store.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(make_oracle(LLAVA), LLAVA, tmp_path_factory.mktemp("llava"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder):
    async with serve(folder) as client:
        yield client


pytestmark = pytest.mark.asyncio(loop_scope="module")


def encoded(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def data_url(image):
    return f"data:image/png;base64,{encoded(image)}"


async def chat(client, *parts, **more):
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, "temperature": 0, **more}
    return await client.post("/v1/chat/completions", json=body)


def text(words):
    return {"type": "text", "text": words}


def picture(url, **more):
    return {"type": "image_url", "image_url": {"url": url}, **more}


async def test_dialects_agree(server):
    [image] = make_images(1)
    answer = (await chat(server, picture(data_url(image)), text("5 6 7"))).json()
    assert answer["usage"]["prompt_tokens"] == 16 + 3
    expected = answer["choices"][0]["message"]["content"]
    parts = [{"type": "input_image", "image_url": data_url(image)}, {"type": "input_text", "text": "5 6 7"}]
    body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 4, "temperature": 0}
    answer = (await server.post("/v1/responses", json=body)).json()
    assert answer["output"][0]["content"][0]["text"] == expected
    source = {"type": "base64", "media_type": "image/png", "data": encoded(image)}
    for each in (source, {"type": "url", "url": data_url(image)}):
        blocks = [{"type": "image", "source": each}, {"type": "text", "text": "5 6 7"}]
        body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 4, "temperature": 0}
        answer = (await server.post("/v1/messages", json=body)).json()
        assert answer["content"][0]["text"] == expected
    options = {"num_predict": 4, "temperature": 0}
    body = {"model": (await server.get("/api/tags")).json()["models"][0]["name"], "stream": False}
    turn = {"role": "user", "content": "5 6 7", "images": [encoded(image)]}
    answer = (await server.post("/api/chat", json={**body, "messages": [turn], "options": options})).json()
    assert answer["message"]["content"] == expected and answer["prompt_eval_count"] == 16 + 3
    asked = {"prompt": "5 6 7", "images": [encoded(image)], "options": options}
    assert (await server.post("/api/generate", json=body | asked)).json()["response"] == expected
    wrong = await server.post("/api/chat", json={**body, "messages": [turn | {"images": "aa"}]})
    assert wrong.status_code == 400 and "list of base64" in wrong.text
    other = Image.new("RGB", image.size, "white")
    assert (await chat(server, picture(data_url(other)), text("5 6 7"))).json()["usage"] is not None


async def test_the_page_learns_of_images(server):
    assert (await server.get("/v1/models")).json()["data"][0]["input_modalities"] == ["text", "image"]


async def test_a_literal_marker_is_text(server):
    answer = await chat(server, text("5 <image> 6"))
    assert answer.status_code == 200
    [image] = make_images(1)
    answer = await chat(server, text("<image>"), picture(data_url(image)))
    assert answer.status_code == 200
    rendered = server.engine.chat.render([{"role": "user", "content": [text("5 <image> 6")]}])
    assert IMAGE not in rendered["prompt_token_ids"] and rendered["prompt"].startswith("5 <image> 6")


async def test_names_and_cached_tokens(server):
    [image] = make_images(1, seed=5)
    long = text(" ".join(["7"] * 40))
    first = (await chat(server, picture(data_url(image), uuid="mine"), long)).json()
    again = (await chat(server, picture(None, uuid="mine"), long)).json()
    assert again["choices"][0]["message"]["content"] == first["choices"][0]["message"]["content"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
    page = (await server.get("/metrics")).text
    assert "vllm:mm_cache_hits_total" in page


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1/a.png", "not public"),
        ("file:///etc/passwd", "Cannot load local files without"),
        ("data:image/png,x", "Only base64 data URLs"),
        ("data:image/png;base64,AAAA", "Failed to load image"),
        ("ftp://example.com/a.png", "either a HTTP, data or file URL"),
    ],
)
async def test_refusals(server, url, said):
    answer = await chat(server, picture(url), text("5"))
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


async def test_the_event_loop_goes_on(server):
    """While a large image is decoded and resized in another process."""
    noise = np.random.default_rng(0).integers(0, 256, (1500, 2000, 1), dtype=np.uint8).repeat(3, axis=2)
    large = Image.fromarray(noise).resize((6000, 4500), 0)
    url = await asyncio.to_thread(data_url, large)
    asked = asyncio.create_task(chat(server, picture(url), text("5")))
    gaps, last = [], time.monotonic()
    while not asked.done():
        await asyncio.sleep(0.001)
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    assert (await asked).status_code == 200
    assert sorted(gaps)[-4] < 0.05  # reading the body's JSON is one piece
