"""A step that a real model cannot compute, or cannot get memory for, under `octavo serve`.

It ends the core, and with it every open request, once; another core comes.
"""

import re
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.process_fakes import wait_until
from tests.served_process import ServeProcess

FLAGS = ["--dtype", "float32", "--skip-tokenizer-init", "--disable-access-log"]
NUM_CLIENTS = 4
SHORT = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
LONG = {**SHORT, "max_tokens": 200}
ENV = {"OCTAVO_FAULT": "worker.forward:raise@100", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""A fault in every core's life, where no short request comes to. No hoard: memory is asked for anew."""


@pytest.fixture(scope="module")
def server(tiny_llama):
    flags = [*FLAGS, "--on-crash", "restart", "--num-gpu-blocks-override", "400"]
    with ServeProcess(*flags, program=program(tiny_llama), env=ENV) as server:
        yield server


def program(path):
    return ["-m", "octavo", "serve", str(path)]


def core_of(server):
    [core] = [child for child in server.children() if "octavo.engine.process" in child.cmdline()]
    return core


def restarts(server):
    lines = server.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("vllm:engine_restarts_total{"))


def all_end_once_and_another_core_comes(server, body):
    """Half of the clients stream. The log has the cause, which clients are not told."""
    num_before = restarts(server)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        bodies = [{**body, "stream": number % 2 == 0} for number in range(NUM_CLIENTS)]
        answers = list(pool.map(lambda body: server.post("/v1/completions", body), bodies))
    for answer, asked in zip(answers, bodies, strict=True):
        assert answer.text.count('"engine_dead"') == 1, answer.text
        assert "[DONE]" not in answer.text and '"finish_reason":"' not in answer.text
        assert answer.status_code == 503 or (answer.status_code == 200 and asked["stream"])
    assert wait_until(lambda: restarts(server) == num_before + 1, 30), server.log
    server.wait_for_status(200)
    assert "hangs" not in server.log


def answer(server):
    [choice] = server.post("/v1/completions", {**SHORT, "return_token_ids": True}).json()["choices"]
    return choice["token_ids"]


def test_a_forward_pass_that_fails(server):
    before = answer(server)
    all_end_once_and_another_core_comes(server, LONG)
    assert "worker.forward was told to fail" in server.log
    assert answer(server) == before


@pytest.mark.slow
def test_a_step_that_gets_no_memory(server):
    before = answer(server)
    core = core_of(server)
    resource.prlimit(core.pid, resource.RLIMIT_AS, (core.memory_info().vms,) * 2)
    all_end_once_and_another_core_comes(server, {**LONG, "prompt": [5] * 200, "max_tokens": 50})
    cause = r"A step failed: .*(Cannot allocate memory|MemoryError)"  # of torch; of Python or a kernel
    assert re.search(cause, server.log), server.log
    assert answer(server) == before


@pytest.mark.slow
def test_a_start_that_gets_no_memory(tiny_llama):
    """More for the cache than the process may have."""
    most = 1 << 36
    flags = [*FLAGS, "--kv-cache-memory-bytes", str(2 * most)]
    limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most))}
    with ServeProcess(*flags, program=program(tiny_llama), wait=False, **limited) as server:
        assert server.end() == 2, server.log
        last = server.log.splitlines()[-1]
    assert last.startswith("octavo: error: A KV cache of ") and "kv_cache_memory_bytes" in last, last
