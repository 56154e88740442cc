"""Two fronts on one core: each gets its own, both survive the core, the owner survives the other."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest

from octavo import AsyncLLM, EngineDead, SamplingParams, Unsupported
from octavo.base.errors import Overloaded
from octavo.config import FrontConfig
from tests.fakes import expected_output, fake_request
from tests.process_fakes import process_config, wait_until

CHILD = """
import asyncio, dataclasses, sys
from pathlib import Path
from octavo import AsyncLLM, SamplingParams
from tests.process_fakes import process_config

async def main():
    config = process_config()
    model = dataclasses.replace(config.model, skip_tokenizer_init=True)
    engine = AsyncLLM.attached(dataclasses.replace(config, model=model), Path(sys.argv[1]), 1)
    await engine.start()
    async for _ in engine.generate([1, 2], SamplingParams(max_tokens=60, detokenize=False)):
        pass

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert wait_until(lambda: list(tmp_path.iterdir()) == [], 5)


@pytest.fixture
async def fronts():
    engines = []

    async def start(num=2, *, num_fronts=0, on_crash="restart", max_num_queued_reqs=-1, **orders):
        config = process_config(**orders)
        model = dataclasses.replace(config.model, skip_tokenizer_init=True)
        front = FrontConfig(max_num_queued_reqs=max_num_queued_reqs)
        config = dataclasses.replace(config, model=model, front=front)
        owner = AsyncLLM(config, on_crash=on_crash, num_fronts=num_fronts or num)
        others = [AsyncLLM.attached(config, owner.core.mailbox_path, front) for front in range(1, num)]
        engines.extend([owner, *others])
        await asyncio.wait_for(asyncio.gather(*(engine.start() for engine in engines)), 20)
        return engines

    yield start
    for engine in reversed(engines):
        await engine.shutdown()


async def collect(engine, seed, max_tokens=20, request_id=None, **about):
    params = SamplingParams(max_tokens=max_tokens, seed=seed, detokenize=False)
    outputs = [output async for output in engine.generate([seed, 2], params, request_id, **about)]
    return outputs[-1].outputs[0]


def answer(seed, max_tokens=20):
    return expected_output(fake_request("", [seed, 2], max_tokens, seed=seed), 64)[0]


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def until_ready(*engines):
    await until(lambda: all(engine.core.health().state == "ready" for engine in engines))


async def until_running(engine, count):
    await until(lambda: engine.core.stats.num_running == count)


async def test_each_gets_its_own(fronts):
    owner, other, third = await fronts(3)
    engines = [owner, other, third] * 8
    runs = [collect(engine, seed, request_id="same") for seed, engine in enumerate(engines, start=1)]
    completions = await asyncio.gather(*runs)
    for seed, completion in enumerate(completions, start=1):
        assert completion.token_ids == answer(seed)
    assert not any(engine.core.processor.num_open for engine in (owner, other, third))
    assert (
        await asyncio.gather(*(e.collective_rpc("ping") for e in (owner, other, third)))
        == [["ping", {}, owner.core.client._core.pid]] * 3
    )
    await until(lambda: other.core.stats.num_steps == owner.core.stats.num_steps > 0)
    for call in (lambda: other.core.mailbox_path, lambda: other.detach_front(2)):
        with pytest.raises(Unsupported):
            call()


async def test_an_abort_reaches_the_requests_of_all_fronts(fronts):
    owner, other = await fronts(step_s=0.01)
    runs = [asyncio.create_task(collect(e, n, 50, "same")) for n, e in enumerate((owner, other), start=1)]
    third = asyncio.create_task(collect(owner, 3, 50, "sam"))
    await until_running(owner, 3)
    await other.abort("same", tenant="somebody")
    await asyncio.sleep(0.05)
    assert not any(run.done() for run in runs), "these are nobody's"
    await other.abort("same")
    assert [(await run).finish_reason for run in runs] == ["abort"] * 2
    assert (await third).token_ids == answer(3, 50)


async def test_a_tenant_ends_his_own_requests_only(fronts):
    owner, other = await fronts(step_s=0.01)
    runs = [
        asyncio.create_task(collect(engine, 1, 50, "same", tenant=tenant))
        for engine in (owner, other)
        for tenant in ("me", "you")
    ]
    await until_running(owner, 4)
    await owner.abort("same", tenant="me")
    reasons = [(await run).finish_reason for run in runs]
    assert reasons == ["abort", "length"] * 2


async def test_a_pause_ends_the_requests_of_all_fronts(fronts):
    owner, other = await fronts(step_s=0.01)
    running = asyncio.create_task(collect(owner, 1, 50))
    await until_running(owner, 1)
    await other.pause_generation()
    assert (await running).finish_reason == "abort"
    later = asyncio.create_task(collect(owner, 2))
    await asyncio.sleep(0.1)
    assert not later.done() and await owner.is_paused()
    await owner.resume_generation()
    assert (await later).token_ids == answer(2)


async def test_a_pause_waits_for_the_requests_of_all_fronts(fronts):
    owner, other = await fronts(step_s=0.01)
    running = asyncio.create_task(collect(owner, 1, 30))
    await until_running(owner, 1)
    pausing = asyncio.create_task(other.pause_generation(mode="wait"))
    await asyncio.sleep(0.05)
    later = asyncio.create_task(collect(owner, 2))
    assert (await running).token_ids == answer(1, 30)
    await asyncio.wait_for(pausing, 2)
    assert not later.done()
    await other.resume_generation()
    assert (await later).token_ids == answer(2)


async def test_the_queue_is_one(fronts):
    owner, other = await fronts(max_num_queued_reqs=2)
    seats = owner.config.scheduler.max_num_seqs
    slots = [engine.reserve() for engine in (owner, other) for _ in range(seats // 2 + 1)]
    for engine in (owner, other):
        with pytest.raises(Overloaded, match="2 sequences wait, max_num_queued_reqs=2"):
            engine.reserve()
    slots.pop(0).release()
    owner.detach_front(1)  # as if it had died with what it had
    more = [owner.reserve() for _ in range(seats // 2 + 2)]
    with pytest.raises(Overloaded):
        owner.reserve()
    for slot in (*slots, *more):
        slot.release()


async def test_one_leaves_and_another_takes_its_place(fronts):
    owner, other = await fronts(step_s=0.01)
    mine = asyncio.create_task(collect(owner, 1, 50))
    theirs = asyncio.create_task(collect(other, 2, 50))
    await until_running(owner, 2)
    await other.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        await theirs
    assert (await mine).token_ids == answer(1, 50)
    assert owner.core.stats.num_running == 0, "what the one who left had is not computed any more"
    owner.detach_front(1)
    successor = AsyncLLM.attached(other.config, owner.core.mailbox_path, 1)
    await asyncio.wait_for(successor.start(), 5)
    assert (await collect(successor, 3)).token_ids == answer(3)
    await successor.shutdown()


async def test_the_requests_of_a_dead_front_end(fronts):
    [owner] = await fronts(1, num_fronts=2, step_s=0.05)
    script = [sys.executable, "-c", CHILD, str(owner.core.mailbox_path)]
    with subprocess.Popen(script, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}) as child:
        while owner.core.stats.num_running == 0:
            await asyncio.sleep(0.02)
        child.kill()
    mine = asyncio.create_task(collect(owner, 1))
    owner.detach_front(1)
    assert (await mine).token_ids == answer(1)
    assert (await owner.core.call("stats"))["num_blocks_used"] == 0


async def test_all_survive_the_core(fronts):
    owner, other = await fronts(step_s=0.01)
    tasks = [asyncio.create_task(collect(engine, 1, 50)) for engine in (owner, other) for _ in range(4)]
    await until_running(owner, 8)
    os.kill(owner.core.client._core.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert time.monotonic() - killed_s < 1.0
    assert all(isinstance(result, EngineDead) and result.retry_after_s for result in results)
    assert other.core.health().state == "restarting"
    with pytest.raises(EngineDead):
        await collect(other, 1)
    await until_ready(owner, other)
    assert [engine.core.health().num_restarts for engine in (owner, other)] == [1, 1]
    completions = await asyncio.gather(*(collect(engine, 3) for engine in (owner, other)))
    assert [completion.token_ids for completion in completions] == [answer(3)] * 2


async def test_all_hear_that_the_core_is_gone_for_good(fronts):
    owner, other = await fronts(on_crash="none")
    os.kill(owner.core.client._core.pid, signal.SIGKILL)
    for engine in (owner, other):
        error = await asyncio.wait_for(engine.core.wait_until_dead(), 2)
        assert error.retry_after_s is None
        assert "exit code -9" in str(error)
        assert engine.core.health().state == "dead"


async def test_a_front_whose_requests_were_dropped_learns_it(fronts):
    owner, other = await fronts(step_s=0.01)
    theirs = asyncio.create_task(collect(other, 2, 50))
    await until_running(owner, 1)
    owner.detach_front(1)  # though it lives
    with pytest.raises(EngineDead, match="dropped"):
        await asyncio.wait_for(theirs, 1)
    await until_ready(other)
    assert (await collect(other, 3)).token_ids == answer(3)


async def test_the_owners_shutdown_is_everybodys(fronts):
    owner, other = await fronts()
    await owner.shutdown()
    error = await asyncio.wait_for(other.core.wait_until_dead(), 2)
    assert "shut down" in str(error)
