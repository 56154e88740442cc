"""The core dies again and again under load; the server is told to end while it starts, at any moment.

OCTAVO_TEST_ROUNDS=20 makes it many; a few are enough to see that nothing is lost or left once it works.
"""

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.served_process import ServeProcess

ROUNDS = int(os.environ.get("OCTAVO_TEST_ROUNDS", "3"))
NUM_CLIENTS = 6
_LONGEST_S = 2.0
"""What a start takes on a slow machine."""
BODY = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True}


@pytest.mark.parametrize(
    "orders", [{}, pytest.param({"fault": "load:hang"}, marks=pytest.mark.slow)], ids=["quick", "slow"]
)
def test_told_to_end_at_any_moment_of_its_start(orders):
    chance = random.Random(ROUNDS)
    moments_s = [_LONGEST_S * (number + chance.random()) / ROUNDS for number in range(ROUNDS)]

    def end_one(after_s):
        with ServeProcess(orders=orders, wait=False) as server:
            time.sleep(after_s)
            server.signal()
            begun_s = time.monotonic()
            assert server.end() in (0, -signal.SIGTERM), server.log
            return time.monotonic() - begun_s

    with ThreadPoolExecutor(4) as pool:
        took_s = list(pool.map(end_one, moments_s))
    assert max(took_s) < 10, took_s


class Clients:
    """They ask without end; every answer must have one end."""

    def __init__(self, server):
        self.ends = []
        self._url = f"{server.url}/v1/completions"
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)

    def __enter__(self):
        self._futures = [self._pool.submit(self._ask_on, number % 2 == 0) for number in range(NUM_CLIENTS)]
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._pool.shutdown()
        for future in self._futures:
            future.result()

    def _ask_on(self, stream):
        with httpx.Client(timeout=60) as client:
            while not self._is_over.is_set():
                answer = client.post(self._url, json={**BODY, "stream": stream})
                self.ends.append(self._end_of(answer))
                if answer.status_code == 503:
                    time.sleep(0.05)

    def _end_of(self, answer):
        text = answer.text
        num_errors, num_goods = text.count('"error":'), text.count('"finish_reason":"length"')
        assert num_errors + num_goods == 1, text
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) > 0
            assert '"engine_dead"' in text
        elif answer.headers["content-type"].startswith("text/event-stream"):
            assert text.count("data: [DONE]") == num_goods, text
        return "error" if num_errors else "done"


def core_of(server):
    [core] = [child for child in server.children() if "octavo.engine.process" in child.cmdline()]
    return core


def restarts(server):
    lines = server.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("vllm:engine_restarts_total{"))


def weight(server):
    """What the front holds: file descriptors, threads, MB."""
    front = psutil.Process(server.process.pid)
    return front.num_fds(), front.num_threads(), front.memory_info().rss >> 20


@pytest.mark.slow
@pytest.mark.parametrize("on_crash", ["restart", "replay"])
def test_the_core_dies_again_and_again(on_crash):
    crashes = [signal.SIGKILL] * ROUNDS + [signal.SIGSTOP] * (1 + ROUNDS // 8)
    flags = ["--stall-timeout", "1", "--disable-access-log", "--on-crash", on_crash]
    with ServeProcess(*flags, orders={"step_s": 0.01, "restarts": "always"}) as server:
        for number, crash in enumerate(crashes, start=1):
            with Clients(server) as clients:
                while "done" not in clients.ends:
                    time.sleep(0.02)
                core_of(server).send_signal(crash)
                while restarts(server) < number:
                    time.sleep(0.05)
                num_answered = len(clients.ends)
                while "done" not in clients.ends[num_answered:]:
                    time.sleep(0.02)
            if on_crash == "restart":
                assert "error" in clients.ends, "somebody was told"
            if number == 2:
                before = weight(server)
        after = weight(server)
        assert server.get("/load").json() == {"server_load": 0}
        server.signal()
        assert server.end() == 0, server.log
    growth = [then - now for then, now in zip(after, before, strict=True)]
    assert growth[0] <= 2 and growth[1] <= 6 and growth[2] < 10, (before, after)  # 6: a pool of threads
