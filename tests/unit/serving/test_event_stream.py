"""`EventStream` and `unless_gone` alone: the three endings of a stream, silence, and clients that leave."""

import asyncio

import pytest

from octavo.base.errors import EngineDead, Overloaded, RequestError
from octavo.config.server import ServerConfig
from octavo.serving.errors import ClientGone, HTTPError
from octavo.serving.streaming import DONE, EventStream, event, leaving, unless_gone


class Client:
    """What is at the other end of an ASGI connection."""

    def __init__(self):
        self.messages = []
        self.gone = asyncio.Event()
        self.sent = asyncio.Event()
        self.is_broken = False

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if self.is_broken:
            raise OSError("the pipe is broken")
        self.messages.append(message)
        self.sent.set()

    @property
    def status(self):
        return self.messages[0]["status"]

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def is_complete(self):
        return not self.messages[-1].get("more_body", False)


async def run(events, client, **config):
    await EventStream(events, ServerConfig(**config))({"type": "http"}, client.receive, client.send)


async def test_a_good_end():
    async def events():
        yield event(b"1")
        yield event(b"2")
        yield DONE

    client = Client()
    await run(events(), client)
    assert client.status == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in client.messages[0]["headers"]
    assert client.body == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert client.is_complete


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("no", "x"), 400),
        (Overloaded("full"), 503),
        (EngineDead("gone"), 503),
        (KeyError("a"), 500),
    ],
)
async def test_an_error_before_the_first_event_has_its_status(error, status):
    async def events():
        raise error
        yield b""

    client = Client()
    await run(events(), client)
    assert client.status == status and client.is_complete
    assert b'"error"' in client.body and b"data:" not in client.body


async def test_an_error_afterwards_is_the_last_event():
    async def events():
        yield event(b"1")
        raise HTTPError(504, "too slow")

    client = Client()
    await run(events(), client)
    assert client.status == 200 and client.is_complete
    first, last = client.body.removesuffix(b"\n\n").split(b"\n\n")
    assert first == b"data: 1"
    assert last.startswith(b'data: {"error":{"message":"too slow"')


async def test_a_client_that_leaves_closes_the_generator():
    closed = asyncio.Event()

    async def events():
        try:
            yield event(b"1")
            await asyncio.Event().wait()
        finally:
            closed.set()

    client = Client()
    task = asyncio.create_task(run(events(), client))
    await client.sent.wait()
    client.gone.set()
    await asyncio.wait_for(task, 1)
    assert closed.is_set()
    assert b"[DONE]" not in client.body and not client.is_complete


async def test_a_connection_that_breaks_closes_the_generator():
    closed = asyncio.Event()

    async def events():
        try:
            while True:
                yield event(b"1")
        finally:
            closed.set()

    client = Client()
    client.is_broken = True
    await asyncio.wait_for(run(events(), client), 1)
    assert closed.is_set()


async def test_silence_is_broken():
    go_on = asyncio.Event()

    async def events():
        await go_on.wait()
        yield DONE

    client = Client()
    task = asyncio.create_task(run(events(), client, sse_keep_alive_interval=0.01))
    while client.body.count(b": keep-alive\n\n") < 3:
        await asyncio.sleep(0.005)
    go_on.set()
    await task
    assert client.body.replace(b": keep-alive\n\n", b"") == DONE


async def test_work_is_cancelled_when_the_client_leaves():
    cancelled = asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    client = Client()
    asyncio.get_running_loop().call_soon(client.gone.set)
    with pytest.raises(ClientGone):
        await unless_gone(leaving(client.receive), work())
    assert cancelled.is_set()


async def test_work_that_is_done_in_time():
    async def work():
        return 7

    async def failing():
        raise RequestError("no")

    client = Client()
    assert await unless_gone(leaving(client.receive), work()) == 7
    with pytest.raises(RequestError):
        await unless_gone(leaving(client.receive), failing())
