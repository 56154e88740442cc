"""Far more clients than places: who is refused learns it at once, and who is let in is served."""

import asyncio
import json
import resource
import socket
import struct
import time
from pathlib import Path

import pytest

from tests.process_fakes import wait_until
from tests.served_process import ServeProcess

NUM_CLIENTS, NUM_SEATS = 200, 4
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)


@pytest.fixture(scope="module")
def server():
    flags = ["--max-num-seqs", str(NUM_SEATS), "--disable-access-log"]
    with ServeProcess(*flags, orders={"step_s": 0.01}) as server:
        yield server


def request_of(path="/v1/completions", **body):
    is_chat = path.startswith("/v1/chat")
    what = {"messages": [{"role": "user", "content": "hello"}]} if is_chat else {"prompt": "hello"}
    content = json.dumps({**what, "seed": 0, "ignore_eos": True, **body})
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode()


async def ask(server, request):
    """The answer's bytes, and after how many seconds its first ones came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        begun_s = time.monotonic()
        writer.write(request)
        first = await reader.read(1 << 16)
        took_s = time.monotonic() - begun_s
        return first + await reader.read(), took_s
    finally:
        writer.close()


@pytest.fixture
async def full(server):
    """All places are taken."""
    taken = [asyncio.create_task(ask(server, request_of(max_tokens=1000))) for _ in range(NUM_SEATS * 5)]
    while load_of(server) < NUM_SEATS * 5:
        await asyncio.sleep(0.01)
    yield
    for task in taken:
        task.cancel()
    await asyncio.gather(*taken, return_exceptions=True)
    assert await asyncio.to_thread(wait_until, lambda: not load_of(server), 5)


def used_blocks(server):
    lines = server.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc"))


def load_of(server):
    return server.get("/load").json()["server_load"]


async def test_two_hundred_clients_at_once(server):
    request = request_of(max_tokens=50, stream=True)
    answers = await asyncio.gather(*(ask(server, request) for _ in range(NUM_CLIENTS)))
    served = [answer for answer, _ in answers if answer.startswith(b"HTTP/1.1 200")]
    refused = [(answer, took_s) for answer, took_s in answers if answer.startswith(b"HTTP/1.1 503")]
    assert len(served) + len(refused) == NUM_CLIENTS
    assert NUM_SEATS * 5 <= len(served) < NUM_CLIENTS, "the seats, and a queue of four times as many"
    assert all(answer.count(b'"finish_reason":"length"') == 1 for answer in served)
    assert all(answer.count(b"data: [DONE]\n\n") == 1 for answer in served)
    assert all(b"retry-after:" in answer.lower() for answer, _ in refused)


async def test_a_refusal_is_quick(server, full):
    """Of 20 at once, while all places are taken; on a busy machine, as quick as what costs nothing."""
    refused, watched = [], []
    for _ in range(5):
        pairs = [ask(server, request) for _ in range(20) for request in (request_of(max_tokens=9), HEALTH)]
        answers = await asyncio.gather(*pairs)
        refused += answers[::2]
        watched += answers[1::2]
    assert all(answer.startswith(b"HTTP/1.1 503") for answer, _ in refused)
    assert all(b"retry-after:" in answer.lower() for answer, _ in refused)
    slowest_s, usual_s = (sorted(took_s for _, took_s in of)[-2] for of in (refused, watched))
    assert slowest_s < max(0.05, 3 * usual_s), (slowest_s, usual_s)


async def test_a_refused_body_is_not_parsed(server, full):
    """Megabytes of JSON that nobody parses; the answer comes though the connection ends with it."""
    broken = request_of(prompt="a" * 4_000_000)[:-1] + b"!"
    for _ in range(3):
        answer, _ = await ask(server, broken)
        assert answer.startswith(b"HTTP/1.1 503")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_reset_at_any_moment_frees_everything(server, path, stream):
    request = request_of(path, max_tokens=2000, stream=stream)
    for after_s in (0, 0.002, 0.01, 0.05, 0.1):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request)
        await asyncio.sleep(after_s)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
    assert await asyncio.to_thread(wait_until, lambda: not load_of(server) and not used_blocks(server), 2)


async def test_readers_that_do_not_read_hold_nobody_up(server):
    """They take the seats for as long as their answers are generated, not for as long as they are unread."""
    request = request_of(max_tokens=50, stream=True)
    idle = []
    for _ in range(NUM_SEATS * 3):
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(request)
        idle.append(client)
    answer, _ = await ask(server, request_of(max_tokens=4))
    assert b'"finish_reason":"length"' in answer
    assert await asyncio.to_thread(wait_until, lambda: not used_blocks(server), 20)
    for client in idle:
        client.close()
    assert await asyncio.to_thread(wait_until, lambda: not load_of(server), 5)


@pytest.mark.slow
async def test_health_is_told_while_much_is_read_and_written():
    """200 streams, and prompts that take seconds to tokenize: all is read, then cut, and then refused."""
    flags = ["--max-num-seqs", str(NUM_CLIENTS), "--disable-access-log"]
    stream = request_of(max_tokens=1000, stream=True)
    huge = request_of(prompt="a" * 5_000_000, truncate_prompt_tokens=4, max_tokens=4093)
    with ServeProcess(*flags, orders={"step_s": 0.1}) as server:
        streams = [asyncio.create_task(ask(server, stream)) for _ in range(NUM_CLIENTS)]
        while load_of(server) < NUM_CLIENTS:
            await asyncio.sleep(0.05)
        read = [asyncio.create_task(ask(server, huge)) for _ in range(2)]
        watched = []
        while not all(task.done() for task in read):
            watched.append(await ask(server, HEALTH))
            await asyncio.sleep(0.02)
        assert not any(task.done() for task in streams)
        assert all(b"the prompt takes 4." in task.result()[0] for task in read)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    assert all(answer.startswith(b"HTTP/1.1 200") for answer, _ in watched)
    assert max(took_s for _, took_s in watched) < 1.0 < sum(took_s + 0.02 for _, took_s in watched)


def test_running_out_of_file_descriptors():
    with ServeProcess("--disable-access-log") as server:
        num_open = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (num_open + 20, num_open + 20))
        crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
        time.sleep(0.5)
        assert server.is_alive()
        for client in crowd:
            client.close()
        server.wait_for_status(200)
        assert server.post("/v1/completions", {"prompt": "hello"}).status_code == 200
        server.signal()
        assert server.end() == 0
