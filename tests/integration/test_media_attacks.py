"""Hostile files through a whole server: each gets a status and a text, and the memory of it all returns."""

import asyncio
import base64
import gc
import io
import socket
import zipfile
import zlib

import psutil
import pytest
import pytest_asyncio
from PIL import Image

from tests.integration.test_images_over_http import chat, data_url, picture, serve, text
from tests.tiny_media import make_images, make_oracle, save
from tests.unit.frontend.media.test_decoding import encoded, png_of

QWEN = "Qwen2_5_VLForConditionalGeneration"
MIB = 2**20
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    folder = save(make_oracle(QWEN), QWEN, tmp_path_factory.mktemp("qwen"))
    limits = {"media_fetch_timeout": 0.5, "video_fetch_timeout": 0.5, "allow_private_media_hosts": True}
    async with serve(folder, media_processes=2, max_image_pixels=40_000_000, **limits) as client:
        yield client


def gif(num_frames):
    """A file of `num_frames` frames of one pixel."""
    frame = b"\x2c" + bytes(4) + b"\x01\x00\x01\x00\x00\x02\x02\x44\x01\x00"
    return b"GIF89a\x01\x00\x01\x00\x80\x00\x00" + bytes(3) + b"\xff\xff\xff" + frame * num_frames + b"\x3b"


def text_bomb():
    """A picture beside a text that is 200 MB long when it is unpacked."""
    body = b"zTXt" + b"note\x00\x00" + zlib.compress(bytes(200 * MIB), 9)
    chunk = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    whole = encoded(Image.new("RGB", (4, 4)))
    return whole[:33] + chunk + whole[33:]


def archive():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("a", bytes(100 * MIB))
    return file.getvalue()


def url_of(content, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def video(url):
    return {"type": "video_url", "video_url": {"url": url}}


def attacks():
    whole = encoded(make_images(1)[0])
    yield picture(url_of(png_of(50_000, 50_000)))
    yield picture(url_of(text_bomb()))
    yield picture(url_of(archive()))
    yield picture(url_of(whole[: len(whole) // 2]))
    yield picture(url_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"))
    yield picture(url_of(encoded(Image.new("RGB", (6000, 6000)))))  # a legal one, of 108 MB
    yield video(url_of(gif(100_000), "image/gif"))
    yield video(url_of(gif(100)[:300], "video/mp4"))


def resident():
    """Return the memory of this process, which is front and engine, and of those that decode."""
    gc.collect()
    here = psutil.Process()
    return sum(process.memory_info().rss for process in (here, *here.children(recursive=True)))


def told(answer):
    """Return the status and the text of an error; the answer itself would keep what was sent."""
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["message"]


async def test_memory_returns(server):
    for seed in range(4):  # both processes have decoded each kind
        images = make_images(2, seed)
        await asyncio.gather(*(chat(server, picture(data_url(image)), text("5")) for image in images))
        await asyncio.gather(*(chat(server, video(url_of(gif(8 + seed), "image/gif"))) for _ in images))
    before = resident()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never answers
        slow = f"http://127.0.0.1:{silent.getsockname()[1]}/a.png"
        parts = [*attacks(), picture(slow), video(slow)] * 2
        answers = [told(a) for a in await asyncio.gather(*(chat(server, p, text("5")) for p in parts))]
        del parts
    huge = b'{"messages": "' + bytes(300 * MIB) + b'"}'
    json_type = {"Content-Type": "application/json"}
    answers.append(told(await server.post("/v1/chat/completions", content=huge, headers=json_type)))
    del huge
    for status, said in answers:
        assert status in (200, 400, 413, 422) and (status == 200 or said), said
        assert not any(secret in said for secret in ("0x", "Traceback", "/usr", "/tmp")), said
    refused = [status for status, _ in answers]
    assert refused[8:10] == [422, 422] and refused[-1] == 413
    assert all(status == 400 for status in (*refused[:5], refused[6]))
    after = resident()
    print(f"resident: {before // MIB} MiB before, {after // MIB} MiB behind; {refused}")
    assert after - before < 50 * MIB
    assert (await chat(server, picture(data_url(make_images(1)[0])), text("5"))).status_code == 200
