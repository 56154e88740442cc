"""`octavo route` as a process before real servers: answers, streams, a server that is killed, keys, its end.

OCTAVO_TEST_ROUTER=1 prints what it adds to a request.
"""

import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import psutil
import pytest

from tests.served_process import ServeProcess, free_port

BODY = {"prompt": "hello " * 60, "max_tokens": 4, "ignore_eos": True, "seed": 1}


@contextmanager
def router(*arguments):
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "octavo",
        "route",
        *arguments,
        "--port",
        str(port),
        "--health-interval",
        "0.2",
    ]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        yield url, process
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def servers():
    with ServeProcess() as one, ServeProcess() as other:
        yield one, other


def test_answers_are_those_of_the_servers(servers):
    direct = servers[0].post("/v1/completions", BODY).json()["choices"]
    with router(*(server.url for server in servers), "--api-key", "k") as (url, process):
        assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 401
        with httpx.Client(headers={"Authorization": "Bearer k"}, timeout=60) as client:
            assert client.post(f"{url}/v1/completions", json=BODY).json()["choices"] == direct
            with client.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}) as answer:
                lines = [line for line in answer.iter_lines() if line]
            assert lines[-1] == "data: [DONE]" and len(lines) > 2
            assert client.get(f"{url}/v1/models").json()["data"]
            assert client.get(f"{url}/nothing").status_code == 404
        loaded = psutil.Process(process.pid).memory_maps()
        assert not any("torch" in entry.path for entry in loaded), "it is light"


def test_a_killed_server_is_passed_over():
    with ServeProcess() as one, ServeProcess() as other, router(one.url, other.url) as (url, _):
        for _ in range(4):
            assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).status_code == 200
        one.signal(signal.SIGKILL)
        one.process.wait()
        for _ in range(4):
            assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).status_code == 200


@pytest.mark.opt_in("OCTAVO_TEST_ROUTER")  # a measurement
def test_what_it_adds(servers):
    def median_ms(client, url):
        times = []
        for _ in range(500):
            begun_s = time.perf_counter()
            client.get(f"{url}/v1/models")
            times.append(time.perf_counter() - begun_s)
        return 1000 * statistics.median(times)

    with router(servers[0].url) as (url, _), httpx.Client() as client:
        added = [median_ms(client, url) - median_ms(client, servers[0].url) for _ in range(3)]
    print(f"added, median: {min(added):.2f} ms of {added}")
    assert min(added) < 1.0
