"""The core dies, hangs or loses a thread under AsyncLLM: everybody is told once, and another core comes."""

import asyncio
import dataclasses
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from octavo import AsyncLLM, EngineDead, SamplingParams
from octavo.config import FrontConfig
from octavo.frontend.client.zmq import AsyncClient
from octavo.messages.control import core_pipe
from tests.fakes import expected_output, fake_request
from tests.process_fakes import RANKS, is_alive, process_config, wait_until

LONG = SamplingParams(max_tokens=60, temperature=0, seed=1, detokenize=False)
ONE = SamplingParams(max_tokens=1, temperature=0, seed=1, detokenize=False)
"""So little that what is to happen later does not."""
SHORT = SamplingParams(max_tokens=5, temperature=0, seed=1, detokenize=False)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """Neither directories nor shared memory, whatever happened."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(Path("/dev/shm").iterdir())
    yield
    assert wait_until(lambda: list(tmp_path.iterdir()) == [], 5)
    after = {path for path in Path("/dev/shm").iterdir() if "octavo" in path.name}
    assert {path for path in after - before if path.is_file()} == set()  # folders: other tests' blocks


class Impatient:
    """A RestartPolicy of fixed delays; None when they are used up."""

    def __init__(self, *delays_s):
        self.delays_s = list(delays_s)

    def delay_s(self):
        return self.delays_s.pop(0) if self.delays_s else None


@pytest.fixture
async def start():
    engines = []

    async def start(executor=None, *, tp=1, stall_timeout=30.0, restarts=None, **orders):
        kind = {} if executor is None else {"executor": executor}
        config = process_config(tp=tp, **kind, **orders)
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, skip_tokenizer_init=True),
            front=FrontConfig(stall_timeout=stall_timeout),
        )
        engines.append(AsyncLLM(config, client=AsyncClient(config, restarts)))
        await engines[-1].start()
        return engines[-1]

    yield start
    for engine in engines:
        await engine.shutdown()


async def collect(engine, prompt=(1, 2, 3), params=SHORT):
    outputs = [output async for output in engine.generate(list(prompt), params)]
    return outputs[-1].outputs[0]


async def ends(engine, count=8, params=LONG):
    """How so many requests end, and after how long."""
    begun_s = time.monotonic()
    tasks = [asyncio.create_task(collect(engine, (i, 2), params)) for i in range(1, count + 1)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return results, time.monotonic() - begun_s


def answer(prompt=(1, 2, 3), params=SHORT):
    return expected_output(fake_request("", list(prompt), params.max_tokens, seed=params.seed), 64)[0]


async def test_a_killed_core_is_followed_by_another(start):
    engine = await start(step_s=0.02, restarts=Impatient(0.0))
    assert engine.core.health().state == "ready"
    ending = asyncio.create_task(ends(engine))
    await asyncio.sleep(0.2)
    pid = engine.core.client._core.pid
    os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    results, _ = await ending
    assert time.monotonic() - killed_s < 1.0
    assert all(isinstance(result, EngineDead) and result.retry_after_s > 0 for result in results)
    assert engine.core.health().state == "restarting"
    assert "exit code -9" in engine.core.health().reason
    with pytest.raises(EngineDead) as refused:
        await collect(engine)
    assert refused.value.retry_after_s is not None
    while engine.core.health().state != "ready":
        assert time.monotonic() - killed_s < 10.0
        await asyncio.sleep(0.02)
    assert engine.core.health().num_restarts == 1
    assert (await collect(engine)).token_ids == answer()
    assert engine.core.client._core.pid != pid
    assert not is_alive(pid)
    assert engine.metrics.engine_restarts.value == 1


async def test_given_up_after_too_many_deaths(start):
    engine = await start(restarts=Impatient(0.0))
    os.kill(engine.core.client._core.pid, signal.SIGKILL)
    while engine.core.health().num_restarts == 0:
        await asyncio.sleep(0.02)
    os.kill(engine.core.client._core.pid, signal.SIGKILL)
    error = await asyncio.wait_for(engine.core.wait_until_dead(), 2)
    assert error.retry_after_s is None
    assert engine.core.health().state == "dead"
    with pytest.raises(EngineDead):
        await collect(engine)


async def test_a_core_that_cannot_come_back(start, monkeypatch):
    engine = await start(restarts=Impatient(0.0, 0.1))
    engine.core.client._config = process_config(fault="load:config")
    os.kill(engine.core.client._core.pid, signal.SIGKILL)
    error = await asyncio.wait_for(engine.core.wait_until_dead(), 10)
    assert "the option is wrong" in str(error)
    assert engine.core.client._restarts.delays_s == []


async def test_shutdown_while_a_core_is_restarted(start):
    engine = await start(restarts=Impatient(60.0))
    os.kill(engine.core.client._core.pid, signal.SIGKILL)
    while engine.core.health().state != "restarting":
        await asyncio.sleep(0.01)
    await asyncio.wait_for(engine.shutdown(), 2)
    assert engine.core.health().state == "dead"


async def test_shutdown_while_the_model_loads(start):
    config = process_config(fault="load:hang")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, skip_tokenizer_init=True))
    engine = AsyncLLM(config)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0.7)
    assert engine.core.health().state == "starting"
    begun_s, pid = time.monotonic(), engine.core.client._core.pid
    await engine.shutdown(grace_s=0.2)
    assert time.monotonic() - begun_s < 3.0
    assert not is_alive(pid)
    with pytest.raises(EngineDead, match="shut down"):
        await starting


@pytest.mark.matrix
@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_stopped_core_is_found_and_replaced(start, is_idle, capfd):
    engine = await start(step_s=0.02, stall_timeout=1.0, restarts=Impatient(0.0))
    ending = None if is_idle else asyncio.create_task(ends(engine))
    await asyncio.sleep(0.3)
    pid = engine.core.client._core.pid
    os.kill(pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    if ending is not None:
        results, _ = await ending
        assert all(isinstance(result, EngineDead) for result in results)
        assert all("hangs" in str(result) for result in results)
        assert time.monotonic() - stopped_s < 1.0 + 2.0
    while engine.core.health().num_restarts == 0:
        assert time.monotonic() - stopped_s < 10.0
        await asyncio.sleep(0.02)
    assert not is_alive(pid)
    assert (await collect(engine)).token_ids == answer()


async def test_a_step_that_hangs_shows_its_stack(start, capfd):
    engine = await start(stall_timeout=1.0, fault="2:hang")
    results, elapsed_s = await ends(engine, 2)
    assert all(isinstance(result, EngineDead) and "hangs" in str(result) for result in results)
    assert elapsed_s < 4.0
    assert (await asyncio.wait_for(engine.core.wait_until_dead(), 1)).retry_after_s is None
    assert wait_until(lambda: not is_alive(engine.core.client._core.pid), 2)
    log = capfd.readouterr().err
    assert "Current thread" in log
    assert "fail_at" in log


async def test_a_long_step_is_no_hang(start):
    engine = await start(stall_timeout=0.5, fault="2:compute")
    assert (await collect(engine)).token_ids == answer()


@pytest.mark.slow
async def test_a_paused_engine_is_no_hang(start):
    engine = await start(step_s=0.01, stall_timeout=0.5)
    running = asyncio.create_task(collect(engine, params=LONG))
    await asyncio.sleep(0.1)
    await engine.pause_generation(mode="keep")
    await asyncio.sleep(1.5)
    assert engine.core.health().state == "ready"
    await engine.resume_generation()
    assert (await running).token_ids == answer(params=LONG)


@pytest.mark.slow
async def test_a_stopped_rank_is_found(start):
    engine = await start(RANKS, tp=2, stall_timeout=1.0)
    pids = [answer[1] for answer in await engine.collective_rpc("whoami")]
    os.kill(pids[0], signal.SIGSTOP)
    results, elapsed_s = await ends(engine, 2)
    assert all(isinstance(result, EngineDead) for result in results)
    assert elapsed_s < 4.0
    assert wait_until(lambda: not any(map(is_alive, pids)), 5)


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["core.decode_add:raise@2", "core.step:raise@4", "core.step:memory@4"])
async def test_a_failing_thread_is_a_failing_engine(start, monkeypatch, fault):
    monkeypatch.setenv("OCTAVO_FAULT", fault)
    engine = await start(restarts=Impatient(0.0))
    results, elapsed_s = await ends(engine, 3)
    assert all(isinstance(result, EngineDead) for result in results)
    assert elapsed_s < 2.0
    while engine.core.health().num_restarts == 0:
        await asyncio.sleep(0.02)
    assert (await collect(engine, params=ONE)).token_ids == answer()[:1]


async def test_garbage_and_duplicates_are_counted(start, tmp_path):
    engine = await start(step_s=0.02)
    running = asyncio.create_task(collect(engine, params=LONG))
    await asyncio.sleep(0.1)
    request = fake_request("mine", [1, 2, 3], 60, seed=1)
    address = f"ipc://{engine.core.mailbox_path / core_pipe(1)}"
    with zmq.Context() as context, context.socket(zmq.PUSH) as intruder:
        intruder.connect(address)
        for frame in (b"", b"\xc1", os.urandom(100), msgspec.msgpack.encode(["detach", 7])):
            intruder.send(frame)
        for _ in range(3):
            intruder.send(msgspec.msgpack.encode(request))
        assert (await running).token_ids == answer(params=LONG)
    assert engine.core.stats.num_dropped == 5
