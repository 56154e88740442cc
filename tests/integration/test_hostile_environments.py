"""A server whose front is stopped, whose disk is full, whose clients dawdle, in odd environments serves."""

import json
import resource
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.served_process import ServeProcess

BODY = {"prompt": "hello", "max_tokens": 4, "seed": 1}
NUM_DAWDLERS = 200


@pytest.mark.slow
def test_a_front_that_stands_still_loses_nothing():
    """For longer than a core may be silent: it was not the core that was."""
    orders = {"step_s": 0.02}
    body = {**BODY, "max_tokens": 150, "ignore_eos": True}
    with ServeProcess("--stall-timeout", "1", orders=orders) as server, ThreadPoolExecutor(4) as pool:
        expected = server.post("/v1/completions", body).json()["choices"][0]["text"]
        answers = [pool.submit(server.post, "/v1/completions", {**body, "stream": True}) for _ in range(4)]
        time.sleep(0.5)
        server.signal(signal.SIGSTOP)
        time.sleep(3.0)
        server.signal(signal.SIGCONT)
        for answer in answers:
            *events, done, end = answer.result().text.split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
            chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
            assert "".join(chunk["text"] for chunk in chunks) == expected
            assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["length"]
        assert "hangs" not in server.log


@pytest.mark.matrix
@pytest.mark.parametrize(
    "env",
    [
        {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "HOME": "/nowhere", "OCTAVO_CACHE_DIR": "/nowhere"},
        {"PYTHONOPTIMIZE": "1", "PYTHONHASHSEED": "7"},
    ],
    ids=lambda env: next(iter(env)),
)
def test_odd_environments(env):
    with ServeProcess(env=env) as server:
        answer = server.post("/v1/completions", {**BODY, "prompt": "é中", "echo": True})
        assert answer.json()["choices"][0]["text"].startswith("é中")
        wrong = server.post("/v1/completions", {**BODY, "temperature": -1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
        server.signal()
        assert server.end() == 0, server.log


@pytest.mark.slow
def test_no_file_may_grow():
    with ServeProcess() as server:
        for process in (server.process, *server.children()):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))
        for _ in range(20):
            assert server.post("/v1/completions", BODY).status_code == 200
            assert server.get("/nowhere").status_code == 404
        server.signal()
        assert server.end() == 0


@pytest.mark.slow
def test_a_crowd_that_dawdles():
    with ServeProcess("--header-timeout", "2", "--disable-access-log") as server:
        crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(NUM_DAWDLERS)]
        took_s = []
        for letter in b"POST /v1/comp":
            for client in crowd:
                client.send(bytes([letter]))
            begun_s = time.monotonic()
            assert server.post("/v1/completions", BODY).status_code == 200
            took_s.append(time.monotonic() - begun_s)
        assert sorted(took_s)[len(took_s) // 2] < 0.5
        for client in crowd:
            client.settimeout(20)
            assert client.recv(100).startswith(b"HTTP/1.1 408")
            client.close()
