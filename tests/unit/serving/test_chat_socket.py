"""Chat over a WebSocket, driven by its ASGI messages."""

import asyncio
import json

import pytest

from tests.unit.serving.test_completion_route import answer_to

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 0}
PROMPT = "user: hi\nassistant:"


class Socket:
    """A client: what it sends is given, what it gets is kept."""

    def __init__(self, app):
        self.incoming = asyncio.Queue()
        self.frames = asyncio.Queue()
        self.closed = None
        self.incoming.put_nowait({"type": "websocket.connect"})
        scope = {"type": "websocket", "path": "/v1/chat/completions", "query_string": b"", "headers": []}
        self.task = asyncio.create_task(app(scope, self.incoming.get, self._take))

    async def _take(self, message):
        if message["type"] == "websocket.send":
            self.frames.put_nowait(json.loads(message["text"]))
        elif message["type"] == "websocket.close":
            self.closed = (message["code"], message["reason"])

    def say(self, text):
        self.incoming.put_nowait({"type": "websocket.receive", "text": text})

    async def answer(self):
        """Frames up to the one with the finish reasons."""
        frames = []
        while not frames or not any(choice["finish_reason"] for choice in frames[-1]["choices"]):
            frames.append(await asyncio.wait_for(self.frames.get(), 5))
        return frames

    async def leave(self):
        self.incoming.put_nowait({"type": "websocket.disconnect", "code": 1000})
        await asyncio.wait_for(self.task, 5)


async def test_two_turns(server):
    socket = Socket(server.app)
    for _ in range(2):
        socket.say(json.dumps({**ASK, "n": 2}))
        *frames, last = await socket.answer()
        assert {frame["object"] for frame in [*frames, last]} == {"chat.completion.chunk"}
        for index in range(2):
            parts = [c for frame in frames for c in frame["choices"] if c["index"] == index]
            assert parts[0]["delta"]["role"] == "assistant"
            assert "".join(part["delta"]["content"] for part in parts) == answer_to(PROMPT, 6, seed=index)[0]
        assert [(c["index"], c["finish_reason"]) for c in last["choices"]] == [(0, "length"), (1, "length")]
        assert last["usage"]["completion_tokens"] == 12
    await socket.leave()
    assert socket.closed is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
        ('{"messages": []}', "messages"),
        ("x" * 2**21, "not valid JSON"),
    ],
)
async def test_an_error_is_told_and_closes(server, text, reason):
    socket = Socket(server.app)
    socket.say(text)
    await asyncio.wait_for(socket.task, 5)
    code, told = socket.closed
    assert code == 4001 and reason in told and len(told.encode()) <= 123
    assert (await socket.frames.get())["error"]["code"] == 400


async def test_bytes_are_no_request(server):
    socket = Socket(server.app)
    socket.incoming.put_nowait({"type": "websocket.receive", "bytes": b"{}"})
    await asyncio.wait_for(socket.task, 5)
    assert socket.closed[0] == 4001


async def test_one_request_at_a_time(server):
    socket = Socket(server.app)
    socket.say(json.dumps({**ASK, "max_tokens": 200}))
    await socket.frames.get()
    socket.say(json.dumps(ASK))
    await asyncio.wait_for(socket.task, 5)
    assert socket.closed[0] == 4001 and "One request at a time" in socket.closed[1]
    assert server.engine.admission.num_sequences == 0


async def test_leaving_ends_the_work(server):
    socket = Socket(server.app)
    socket.say(json.dumps({**ASK, "max_tokens": 200}))
    await socket.frames.get()
    await socket.leave()
    assert server.engine.admission.num_sequences == 0
