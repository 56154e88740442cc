"""What no client should send, to a server without a model: refused as it should be, unnoticed by others."""

import asyncio
import json
import socket

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.bad_requests import COMPLETION, TEXT, faults, request_of, rows
from tests.process_fakes import wait_until
from tests.served_process import ServeProcess

GOOD = json.dumps(TEXT).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server():
    with ServeProcess() as server:
        yield server


@pytest.fixture(autouse=True)
def nobody_notices(server):
    """The same answer before and after a test, and nothing left open by it."""
    before, start = text_of(server), len(server.log)
    yield
    assert text_of(server) == before
    assert wait_until(lambda: is_at_rest(server), 5)
    assert "Traceback" not in server.log[start:]


def text_of(server):
    return server.post(COMPLETION, TEXT).json()["choices"][0]["text"]


def metrics_of(server):
    return [
        sample
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
    ]


def is_at_rest(server):
    watched = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
    values = [sample.value for sample in metrics_of(server) if sample.name in watched]
    return len(values) >= 3 and not any(values) and server.get("/load").json()["server_load"] == 0


def talk(server, *pieces, timeout_s=5, silence_s=0.1):
    """All that the server says to these bytes until it closes, or until there is silence after its answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout_s) as connection:
        for piece in pieces:
            connection.sendall(piece)
        heard = b""
        try:
            while piece := connection.recv(1 << 16):
                heard += piece
                connection.settimeout(silence_s)
        except (TimeoutError, ConnectionResetError):
            pass
    return heard


def test_every_row(server):
    with httpx.Client(base_url=server.url, timeout=30) as client:
        found = [
            f"{row.name}: {fault}"
            for row in rows()
            for fault in faults(row, client.send(request_of(client, row)))
        ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        (b"Content-Length: 5", GOOD, b"400"),
        (b"Content-Length: -1", GOOD, b"400"),
        (b"Content-Length: 0x10", GOOD, b"400"),
        (b"Content-Length: 99999999999999999999", GOOD, b"400"),
        (b"Content-Length: 999999999999", GOOD, b"413"),
        (b"Content-Length: 10\r\nContent-Length: 11", GOOD, b"400"),
        (b"Content-Length: 10\r\nTransfer-Encoding: chunked", GOOD, b"400"),
        (b"Transfer-Encoding: gzip", GOOD, b"501"),
        (b"Transfer-Encoding: chunked", b"zz\r\n" + GOOD, b"400"),
        (b"Transfer-Encoding: chunked", b"-5\r\n" + GOOD, b"400"),
        (b"Transfer-Encoding: chunked", b"ffffffffffffffffff\r\n" + GOOD, b"400"),
        (b"Transfer-Encoding: chunked", b"2\r\n{}\r\n0\r\n\r\n", b"400"),
        (b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD), b"200"),
        (b"X: \x00", GOOD, b"400"),
        (b": x", GOOD, b"400"),
    ],
)
def test_bodies_that_are_not_what_their_head_says(server, headers, body, status):
    heard = talk(server, HEAD + headers + b"\r\n\r\n" + body)
    assert heard.startswith(b"HTTP/1.1 " + status), heard[:200]


def test_a_chunked_body_without_an_end(server):
    """It stops at the bound of a body's size, however slowly it gets there."""
    chunk = b"%x\r\n%b\r\n" % (1 << 20, b"a" * (1 << 20))
    try:
        heard = talk(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 20)
    except (BrokenPipeError, ConnectionResetError):
        return
    assert heard.startswith(b"HTTP/1.1 413")


def test_clients_that_leave_in_the_middle(server):
    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD
    for cut in range(1, len(whole), 7):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(whole[:cut])


def test_requests_that_do_not_wait_for_answers(server):
    one = HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD
    bad = HEAD + b"Content-Length: 2\r\n\r\n{}"
    heard = talk(server, (one + bad) * 20, silence_s=1.0)
    statuses = [line[9:12] for line in heard.split(b"HTTP/1.1 ")[1:] for line in [b"HTTP/1.1 " + line]]
    assert statuses == [b"200", b"400"] * 20


def test_many_methods_and_paths_make_no_new_labels(server):
    with httpx.Client(base_url=server.url) as client:
        for number in range(300):
            assert client.request("GET", f"/no/such/{number}").status_code == 404
    for number in range(0, 300, 25):
        assert talk(server, b"M%d / HTTP/1.1\r\nHost: localhost\r\n\r\n" % number).startswith(b"HTTP/1.1 4")
    assert len(metrics_of(server)) < 3000


async def test_requests_of_one_id_get_their_own_answers(server):
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:

        async def ask(prompt, **options):
            body = {**TEXT, "prompt": prompt, "max_tokens": 20, **options}
            answer = await client.post(COMPLETION, json=body, headers={"X-Request-Id": "one"})
            return answer.json()["choices"][0]["text"]

        prompts = [f"prompt {n % 4}" for n in range(16)]
        alone = [await ask(prompt) for prompt in prompts]
        assert await asyncio.gather(*map(ask, prompts)) == alone
        assert await asyncio.gather(*(ask(prompt, request_id="two") for prompt in prompts)) == alone
        assert len(set(alone)) == 4
