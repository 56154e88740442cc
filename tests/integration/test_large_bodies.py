"""Bodies that come together: what the server holds of them is bounded, and small requests go on."""

import socket
from collections import Counter

import psutil

from tests.served_process import ServeProcess

BUDGET, LARGEST, COUNT = 64 << 20, 16 << 20, 60


def begin(server, address):
    """A request all of whose body but the last byte has been sent, as far as the server takes it."""
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30, source_address=(address, 0))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {LARGEST}\r\n"
    client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n")
    for _ in range(16):
        client.sendall(b" " * (LARGEST // 16 - 1))
    return client


def answer(client):
    client.settimeout(0.1)
    try:
        return client.recv(1000).decode()
    except TimeoutError:
        return ""


def test_sixty_unfinished_bodies_of_sixteen_mebibytes():
    with ServeProcess("--max-pending-body-bytes", str(BUDGET)) as server:
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        clients = [begin(server, f"127.0.0.{1 + index % 2}") for index in range(COUNT)]
        body = {"model": "fake", "prompt": "hello", "max_tokens": 2}
        assert server.post("/v1/completions", body).status_code == 200, "small requests are read"
        grown = process.memory_info().rss - before
        answers = list(map(answer, clients))
        refused = [text for text in answers if text]
        assert COUNT - len(refused) == BUDGET // LARGEST
        taken = Counter(index % 2 for index, text in enumerate(answers) if not text)
        assert taken == {0: 2, 1: 2}, "half of it for each address"
        assert all(text.startswith("HTTP/1.1 503 ") and "retry-after: 1" in text.lower() for text in refused)
        assert grown < BUDGET + (48 << 20), f"{grown >> 20} MiB"
        for client in clients:
            client.close()
        large = {**body, "prompt": "x" * (LARGEST - 1000)}
        assert server.post("/v1/completions", large).status_code == 400, "what was held is free again"
