"""A client resets its connection, whatever state its request is in: two steps later nothing of it is left.

The executor makes a step when the test says so: steps are counted here, not seconds.
"""

import asyncio
import json
import os
import socket
import struct

import pytest
import pytest_asyncio

from octavo.config.server import ServerConfig
from octavo.serving.process.http_server import HttpServer
from tests.serving import served

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUM_SEATS, TOKENS_PER_STEP = 2, 64
LONG = "x" * 200
"""A prompt of four steps and, in the end, 50 blocks."""
_RESET = struct.pack("ii", 1, 0)


class Steps:
    """A server on a socket, and the steps of its engine."""

    def __init__(self, engine, gate, address):
        self._engine = engine
        self._gate = gate
        self._address = address

    @property
    def stats(self):
        return self._engine.core.stats

    @property
    def num_open(self):
        return self._engine.core.processor.num_open

    async def make(self, count):
        """So many more steps."""
        made = self.stats.num_steps + count
        os.write(self._gate, b"x" * count)
        await until(lambda: self.stats.num_steps == made)

    async def ask(self, path="/v1/completions", **body):
        num_open = self.num_open
        content = json.dumps({"ignore_eos": True, **body})
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        _, writer = await asyncio.open_connection(*self._address)
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
        await until(lambda: self.num_open > num_open)
        await asyncio.sleep(0.1)  # for the core to hear of it
        return writer

    async def reset(self, writer):
        """As a client that crashes does; until the front has noticed, for which no step is needed."""
        num_open = self.num_open
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
        await until(lambda: self.num_open < num_open)
        await asyncio.sleep(0.1)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def steps(tmp_path_factory):
    path = tmp_path_factory.mktemp("gate") / "fifo"
    os.mkfifo(path)
    gate = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    limits = {"max_num_seqs": NUM_SEATS, "max_num_batched_tokens": TOKENS_PER_STEP}
    async with served(gate=str(path), **limits) as server:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        http = HttpServer(server.app, ServerConfig(), listener)
        http.start()
        yield Steps(server.engine, gate, listener.getsockname())
        await http.close(0.2)
        listener.close()
        os.write(gate, b"x" * 1000)
    os.close(gate)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("state", ["waiting", "prompt", "output"])
async def test_two_steps_after_a_reset_its_blocks_are_free(steps, state, path, stream):
    mates = [await steps.ask(prompt="a", max_tokens=200) for _ in range(NUM_SEATS - (state != "waiting"))]
    await steps.make(2)
    what = (
        {"prompt": LONG} if path == "/v1/completions" else {"messages": [{"role": "user", "content": LONG}]}
    )
    victim = await steps.ask(path, **what, max_tokens=30, stream=stream)
    await steps.make({"waiting": 2, "prompt": 3, "output": 7}[state])
    before = steps.stats
    assert (before.num_waiting, before.num_running) == ((1, 2) if state == "waiting" else (0, 2))
    assert state == "waiting" or before.num_blocks_used > TOKENS_PER_STEP // 4
    await steps.reset(victim)
    await steps.make(2)
    after = steps.stats
    assert (after.num_waiting, after.num_running) == (0, len(mates))
    assert after.num_blocks_used <= 4 * len(mates)
    for mate in mates:
        await steps.reset(mate)
    await steps.make(1)
    await until(lambda: steps.stats.num_blocks_used == 0)
