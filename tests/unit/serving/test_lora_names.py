"""Every route hands the adapter that a request names to the engine. This one has none, and says so."""

import pytest

from octavo.serving.adapters import ServedAdapter

pytestmark = pytest.mark.asyncio(loop_scope="module")
TURN = {"messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": TURN,
    "/v1/chat/completions/batch": {"messages": [TURN["messages"]]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": TURN | {"max_tokens": 4},
    "/generate": {"prompt": "hi"},
}


@pytest.fixture
def named(server):
    names = server.app.state.engines.adapters._known
    names["mine"] = ServedAdapter("mine", "/no/such", 1)
    yield
    names.clear()


@pytest.mark.parametrize("path", BODIES)
async def test_each_route_takes_adapters(server, named, path):
    body = BODIES[path]
    for asks in {"model": "mine"}, {"model": "fake", "lora": [{"name": "mine"}]}:
        answer = await server.client.post(path, json=body | asks)
        assert answer.status_code == 400, answer.text
        assert "Got lora_request 'mine' but LoRA is not enabled" in answer.text
    assert (await server.client.post(path, json=body | {"model": "fake"})).status_code == 200
    assert (await server.client.post(path, json=body | {"model": "fake", "lora": []})).status_code == 200
    assert (await server.client.post(path, json=body | {"model": "yours"})).status_code == 404
