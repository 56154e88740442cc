"""Pictures through the routes of a server of a model that embeds: /v1/embeddings and Cohere's."""

import numpy as np
import pytest
import pytest_asyncio

from tests.integration.test_images_over_http import data_url, picture, serve, text
from tests.parity.test_image_embedders import CLIP, SIGLIP, image_features, text_features
from tests.tiny_image_embedders import oracle_of
from tests.tiny_media import make_images

pytestmark = pytest.mark.asyncio(loop_scope="module")
EXACT = {"dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[CLIP, SIGLIP])
async def server(request):
    folder = oracle_of(request.param)[1]
    async with serve(folder, max_model_len=24, **EXACT) as client:
        client.architecture = request.param
        yield client


async def embedded(server, *parts):
    messages = [{"role": "user", "content": list(parts)}]
    answer = await server.post("/v1/embeddings", json={"messages": messages})
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["data"][0]["embedding"])


@pytest.mark.matrix
async def test_pictures_and_texts(server):
    """A conversation with one part is embedded without a template; a plain input is a text."""
    [image] = make_images(1)
    seen = await embedded(server, picture(data_url(image)))
    assert np.abs(seen - image_features(server.architecture, [image])[0].numpy()).max() <= 1e-5
    told = await embedded(server, text("5 6 7"))
    plain = (await server.post("/v1/embeddings", json={"input": ["5 6 7", "8"]})).json()["data"][0]
    assert np.abs(told - text_features(server.architecture, "5 6 7")[0].numpy()).max() <= 1e-5
    assert np.abs(told - np.array(plain["embedding"])).max() <= 1e-6


@pytest.mark.parametrize("field", ["messages", "input"])
async def test_several_conversations(server, field):
    """Each has a vector; one may stand in either field."""
    chats = [[{"role": "user", "content": [text(words)]}] for words in ("5 6 7", "8")]
    plain = (await server.post("/v1/embeddings", json={"input": ["5 6 7", "8"]})).json()["data"]
    for given, expected in ((chats, plain), (chats[0], plain[:1])):
        found = (await server.post("/v1/embeddings", json={field: given})).json()["data"]
        assert (
            np.abs(np.array([a["embedding"] for a in found]) - [b["embedding"] for b in expected]).max()
            <= 1e-6
        )
    for mixed in ([chats[0], chats[1][0]], [chats[0], []], [chats[0], "8"]):
        answer = await server.post("/v1/embeddings", json={field: mixed})
        assert answer.status_code == 400, answer.text


async def test_coheres_images(server):
    images = make_images(3)
    answer = await server.post("/v2/embed", json={"images": [data_url(image) for image in images]})
    found = np.array(answer.json()["embeddings"]["float"])
    assert np.abs(found - image_features(server.architecture, images).numpy()).max() <= 1e-5
    both = await server.post("/v2/embed", json={"images": [data_url(images[0])], "texts": ["5"]})
    assert both.status_code == 400 and "one of them" in both.text


async def test_bad_pictures(server):
    """Each is refused by itself, with a text."""
    messages = [{"role": "user", "content": [picture("data:image/png;base64,AAAA")]}]
    answer = await server.post("/v1/embeddings", json={"messages": messages})
    assert answer.status_code == 400 and "Failed to load image" in answer.text
    messages[0]["content"] = [picture(data_url(make_images(1)[0])), text("5")]
    answer = await server.post("/v1/embeddings", json={"messages": messages})
    assert answer.status_code == 400 and "a text or an image, not both" in answer.text
