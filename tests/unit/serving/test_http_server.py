"""What a client may do to a connection: raw sockets against the server with a small application behind it."""

import asyncio
import errno
import json
import logging
import re
import socket
import time
from contextlib import asynccontextmanager

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.config.server import ServerConfig
from octavo.serving.process.http_server import HttpServer

HOST = b"Host: localhost\r\n"
GET = b"GET /x HTTP/1.1\r\n" + HOST + b"\r\n"
PATIENCE_S, SOON_S = 10.0, 5.0
"""How long a test listens, and what shows on any machine that it was the server who closed."""


class Application:
    """Answers with the length of the body. /early reads none, /slow waits, /forever streams."""

    def __init__(self):
        self.num_calls = 0
        self.ended = asyncio.Event()

    async def __call__(self, scope, receive, send):
        self.num_calls += 1
        body = b""
        while scope["method"] == "POST" and scope["path"] != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                self.ended.set()
                return
            body += message["body"]
            if not message["more_body"]:
                break
        if scope["path"] == "/slow":
            await asyncio.sleep(0.2)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while scope["path"] == "/forever":
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
            await asyncio.sleep(0)
            if await _is_gone(receive):
                self.ended.set()
                return
        await send({"type": "http.response.body", "body": str(len(body)).encode()})


async def _is_gone(receive):
    try:
        return (await asyncio.wait_for(receive(), 0.001))["type"] == "http.disconnect"
    except TimeoutError:
        return False


@asynccontextmanager
async def running(tick_s=0.02, **limits):
    """(application, connect): a server in this event loop."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    application = Application()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.serving.process.http_server._TICK_S", tick_s)
        patch.setattr("octavo.serving.process.connection._LINGER_S", 0.1)
        server = HttpServer(application, ServerConfig(**limits), listener)
        server.start()
        writers = []

        async def connect():
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writers.append(writer)
            return reader, writer

        try:
            yield application, connect
        finally:
            await server.close(0.2)
            listener.close()
            for writer in writers:
                writer.transport.abort()
            await asyncio.sleep(0.01)


async def test_processes_share_clients_that_come_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(8)]
        config = ServerConfig(api_server_count=2)
        servers = [HttpServer(Application(), config, listener.dup()) for _ in range(2)]
        for server in servers:
            server.start()
        while sum(counts := [len(server._state.connections) for server in servers]) < len(clients):
            await asyncio.sleep(0.01)
        assert min(counts) >= 3
        for server in servers:
            await server.close(0.2)
            server._listener.close()
        for client in clients:
            client.close()


async def exchange(connect, data, *, pause_s=0.0, patience_s=PATIENCE_S):
    """Everything that comes back until the server closes, or is silent for so long; and how long it took."""
    begun_s = time.monotonic()
    reader, writer = await connect()
    for part in data if isinstance(data, list) else [data]:
        writer.write(part)
        await asyncio.sleep(pause_s)
    answer = b""
    try:
        while chunk := await asyncio.wait_for(reader.read(65536), patience_s):
            answer += chunk
    except TimeoutError:
        pass
    writer.close()
    return answer, time.monotonic() - begun_s


async def drip(connect, head, piece):
    """What comes back while piece comes after piece, for as long as nothing does."""
    reader, writer = await connect()
    writer.write(head)
    answer = asyncio.create_task(reader.read(65536))
    async with asyncio.timeout(SOON_S):
        while not answer.done():
            writer.write(piece)
            await asyncio.wait([answer], timeout=0.05)
    writer.close()
    return await answer


def status_of(answer):
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00 hello\r\n\r\n", 400),
        (b"FOO /x HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /x HTTP/9.9\r\n" + HOST + b"\r\n", 400),
        (b"GET /x HTTP/1.1\r\nbroken line\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /x HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /x HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 1_000_000, 431),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431),
        (b"GET /x HTTP/1.1\r\n" + HOST + b"a: b\r\n" * 101 + b"\r\n", 431),
        (b"POST /x HTTP/1.1\r\n" + HOST + b"content-length: -1\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\n" + HOST + b"content-length: 1\r\ncontent-length: 2\r\n\r\na", 400),
        (
            b"POST /x HTTP/1.1\r\n"
            + HOST
            + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST /x HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /x HTTP/1.1\r\n" + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (
            b"POST /x HTTP/1.1\r\n"
            + HOST
            + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            501,
        ),
    ],
)
async def test_what_is_not_a_request(data, status):
    async with running() as (_, connect):
        answer, _ = await exchange(connect, data)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert status_of(answer) == status
        assert b"connection: close" in head
        assert json.loads(body)["error"]["code"] == status
        assert b" 200 " in (await exchange(connect, GET, patience_s=0.1))[0], "the server goes on"


async def test_heads_within_the_bounds_are_served():
    async with running() as (_, connect):
        head = b"GET /x HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 60_000 + b"\r\n" + b"a: b\r\n" * 90 + b"\r\n"
        assert status_of((await exchange(connect, head, patience_s=0.2))[0]) == 200


async def test_the_answer_to_a_large_head_survives_the_body_behind_it():
    async with running() as (_, connect):
        data = (
            b"POST /x HTTP/1.1\r\n"
            + HOST
            + b"X: "
            + b"a" * 500_000
            + b"\r\ncontent-length: 9\r\n\r\n"
            + b"b" * 300_000
        )
        for _ in range(5):
            assert status_of((await exchange(connect, [data[:400_000], data[400_000:]]))[0]) == 431


async def test_slow_heads_and_bodies():
    async with running(header_timeout=0.2, body_timeout=0.3) as (application, connect):
        silent, took_s = await exchange(connect, b"")
        assert silent == b""
        assert 0.2 <= took_s < SOON_S
        slow, took_s = await exchange(connect, b"GET /x HT")
        assert (status_of(slow), took_s < SOON_S) == (408, True)
        half = b"POST /x HTTP/1.1\r\n" + HOST + b"content-length: 10\r\n\r\nhalf"
        answer, took_s = await exchange(connect, half)
        assert (status_of(answer), 0.3 <= took_s < SOON_S) == (408, True)
        await asyncio.wait_for(application.ended.wait(), SOON_S)


async def test_bytes_that_come_one_by_one_win_no_time():
    async with running(header_timeout=0.2, body_timeout=0.2) as (_, connect):
        assert status_of(await drip(connect, b"GET /", b"x")) == 408
        endless = b"POST /x HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"
        assert status_of(await drip(connect, endless, b"1\r\na\r\n")) == 408


async def test_an_answer_that_takes_long_is_nobodys_fault():
    async with running(header_timeout=0.1, body_timeout=0.1, write_timeout=0.1) as (_, connect):
        request = GET.replace(b"/x", b"/slow")
        assert status_of((await exchange(connect, request, patience_s=0.5))[0]) == 200
        answer, _ = await exchange(connect, [request, b"GET /x HT"], pause_s=0.01)
        assert status_of(answer) == 200, "the next request, half sent, does not disturb it"


async def test_requests_in_a_row_and_at_once():
    async with running(keep_alive_timeout=0.3) as (application, connect):
        answer, took_s = await exchange(connect, GET * 3)
        assert answer.count(b" 200 OK") == 3
        assert took_s < SOON_S, "an idle connection is closed"
        assert b"date: " in answer
        assert application.num_calls == 3


async def test_an_answer_that_comes_before_the_body():
    async with running(keep_alive_timeout=0.3, body_timeout=0.6) as (_, connect):
        head = b"POST /early HTTP/1.1\r\n" + HOST + b"content-length: 1000000\r\n\r\n"
        body = [b"x" * 100_000] * 10
        answer, took_s = await exchange(connect, [head, *body, GET], pause_s=0.01)
        assert answer.count(b" 200 OK") == 2, "the body is dropped, the next request is served"
        answer, took_s = await exchange(connect, [head, *body], pause_s=0.05)
        assert (answer.count(b" 200 OK"), took_s < SOON_S) == (1, True), "then it is idle, and closed"
        answer, took_s = await exchange(connect, [head, body[0]])
        assert (answer.count(b" 200 OK"), took_s < SOON_S) == (1, True), "half a body is not waited for"


async def test_a_reader_without_progress_is_given_up_and_a_slow_one_is_not():
    async with running(write_timeout=0.4) as (application, connect):
        request = GET.replace(b"/x", b"/forever")
        reader, writer = await connect()
        writer.write(request)
        for _ in range(30):
            assert await reader.readexactly(100_000)
            await asyncio.sleep(0.03)
        assert not application.ended.is_set()
        reader._transport.pause_reading()
        await asyncio.wait_for(application.ended.wait(), 5)
        writer.close()


async def test_connections_beyond_the_most_wait_for_a_place():
    async with running(max_connections=2) as (_, connect):
        first, second, third = [await connect() for _ in range(3)]
        await asyncio.sleep(0.1)
        third[1].write(GET)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(third[0].readline(), 0.3)
        first[1].close()
        assert b" 200 " in await asyncio.wait_for(third[0].readline(), 2)
        for _, writer in (second, third):
            writer.close()


async def test_no_file_descriptors_left_is_survived(monkeypatch):
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.EMFILE]

    async def failing(listener):
        if failures:
            raise OSError(failures.pop(), "no more")
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", failing)
    monkeypatch.setattr("octavo.serving.process.http_server._ACCEPT_RETRY_S", 0.01)
    async with running() as (_, connect):
        assert b" 200 " in (await exchange(connect, GET, patience_s=0.2))[0]
    assert not failures


async def test_the_end_lets_answers_out_and_cuts_what_takes_too_long():
    async with running() as (_, connect):
        (slow, slow_writer), (endless, endless_writer) = await connect(), await connect()
        slow_writer.write(GET.replace(b"/x", b"/slow").replace(HOST, HOST))
        endless_writer.write(GET.replace(b"/x", b"/forever"))
        await asyncio.sleep(0.1)
    assert b" 200 " in await slow.readline()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await endless.readexactly(1 << 30)
    for writer in (slow_writer, endless_writer):
        writer.close()


OFFER = b"POST /x HTTP/1.1\r\n" + HOST + b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMA\r\n"


@pytest.mark.parametrize("offer", [b"h2c", b"H2C, websocket", b"TLS/1.0"])
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
async def test_an_upgrade_that_is_not_taken_costs_no_body(offer, is_chunked, is_split):
    """Java's HTTP client offers h2c with every request."""
    body = b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n" if is_chunked else b""
    request = OFFER + b"Upgrade: " + offer + b"\r\n" + (body or b"Content-Length: 5\r\n\r\nhello")
    cut = len(request) - 5 if is_split else len(request)
    async with running() as (application, connect):
        answer, _ = await exchange(
            connect, [request[:cut], request[cut:] + GET], pause_s=0.05, patience_s=0.2
        )
        assert application.num_calls == 2
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b"\r\n\r\n5HTTP" in answer or b"\r\n\r\n1\r\n5\r\n0\r\n\r\nHTTP" in answer, answer


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        (b"CONNECT localhost:80", b"", 400),
        (b"CONNECT localhost:80", b"Connection: Upgrade\r\nUpgrade: h2c\r\n", 400),
        (
            b"POST /x",
            b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 1\r\nContent-Length: 2\r\n",
            400,
        ),
        (b"POST /x", b"Connection: Upgrade\r\nUpgrade: h2c\r\nX: " + b"a" * 70_000 + b"\r\n", 431),
    ],
)
async def test_offers_that_are_odd(request_line, headers, status):
    async with running() as (_, connect):
        data = request_line + b" HTTP/1.1\r\n" + HOST + headers + b"\r\n"
        answer, _ = await exchange(connect, data, patience_s=0.2)
        assert status_of(answer) == status


async def test_pipelined_offers_are_all_answered():
    """One level of recursion, or a copy of all the rest, for each of them would be felt."""
    offer = b"GET /x HTTP/1.1\r\n" + HOST + b"Connection: upgrade\r\nUpgrade: h\r\n\r\n"
    async with running() as (application, connect):
        answer, _ = await exchange(connect, offer * 3000 + b"garbage\r\n\r\n")
    assert application.num_calls == answer.count(b"HTTP/1.1 200 OK") == 3000
    assert answer.count(b"HTTP/1.1 400 Bad Request") == 1


@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize(
    ("refused", "status"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"POST /x HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
async def test_what_is_refused_waits_for_the_answers_before_it(before, refused, status, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "propagate", True)
    slow = b"GET /slow HTTP/1.1\r\n" + HOST + b"\r\n"
    async with running() as (application, connect):
        answer, _ = await exchange(connect, slow * before + refused)
        assert application.num_calls == before
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200"] * before + [b"%d" % status]
    assert "Traceback" not in caplog.text and "Exception in ASGI" not in caplog.text


async def test_tiny_chunks_are_passed_on_together(monkeypatch):
    pieces, on_body = [], HttpToolsProtocol.on_body

    def noted(self, body):
        pieces.append(body)
        on_body(self, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", noted)
    async with running() as (_, connect):
        head = b"POST /x HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        answer, _ = await exchange(connect, head + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n")
    assert status_of(answer) == 200 and answer.endswith(b"20000\r\n0\r\n\r\n")
    assert len(pieces) < 200 and b"".join(pieces) == b"x" * 20_000
