"""Open requests go on in the next core as if nothing had happened: several fronts, replicas, deadly ones."""

import asyncio
import dataclasses
import os
import signal
import time
from unittest.mock import patch

import pytest

from octavo import AsyncLLM, EngineDead, RequestError, SamplingParams
from octavo.config import FrontConfig
from octavo.frontend.client.restart import RestartPolicy
from octavo.frontend.requests.open_request import SampledRequest
from octavo.messages.sampling import RequestOutputKind
from tests.fakes import expected_output, fake_request
from tests.process_fakes import process_config, wait_until

NUM_TOKENS = 50


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert wait_until(lambda: list(tmp_path.iterdir()) == [], 5)


@pytest.fixture
async def start(monkeypatch):
    engines = []

    async def start(*, num_fronts=1, replicas=1, delay_s=0.0, stall_timeout=1.0, on_crash="replay", **orders):
        monkeypatch.setattr(RestartPolicy, "delay_s", lambda policy: delay_s)
        config = process_config(step_s=0.01, **orders)
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, skip_tokenizer_init=True),
            front=FrontConfig(stall_timeout=stall_timeout),
            parallel=dataclasses.replace(config.parallel, data_parallel_size=replicas),
        )
        owner = AsyncLLM(config, on_crash=on_crash, num_fronts=num_fronts)
        engines.append(owner)
        for front in range(1, num_fronts):
            engines.append(AsyncLLM.attached(config, owner.core.mailbox_path, front, on_crash))
        await asyncio.wait_for(asyncio.gather(*(engine.start() for engine in engines)), 20)
        return engines if num_fronts > 1 else owner

    yield start
    for engine in reversed(engines):
        await engine.shutdown()


async def tokens_of(engine, seed, request_id=None, timeout_s=None, **about):
    """The tokens of a stream, piece after piece, and how it ended."""
    params = SamplingParams(
        max_tokens=NUM_TOKENS,
        seed=seed,
        timeout_s=timeout_s,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    tokens, reason = [], None
    async for output in engine.generate([seed, 2], params, request_id, **about):
        tokens += output.outputs[0].token_ids
        reason = output.outputs[0].finish_reason
    return tokens, reason


def answer(seed):
    return expected_output(fake_request("", [seed, 2], NUM_TOKENS, seed=seed), 64)[0], "length"


def pid_of(engine, replica=None):
    door = engine.core.client if replica is None else engine.core.client.doors[replica]
    return door._core.pid


async def streams_over_deaths(engines, deaths, num=16):
    """What `num` streams bring while the core dies so often."""
    runs = [asyncio.create_task(tokens_of(engines[i % len(engines)], i)) for i in range(1, num + 1)]
    for number, death in enumerate(deaths, 1):
        await asyncio.sleep(0.25)
        os.kill(pid_of(engines[0]), death)
        async with asyncio.timeout(10):
            while engines[0].core.health().num_restarts < number:
                await asyncio.sleep(0.02)
    return await asyncio.wait_for(asyncio.gather(*runs), 30)


@pytest.mark.matrix
@pytest.mark.parametrize("num_fronts", [1, 3])
async def test_streams_go_on_over_deaths_and_hangs(start, num_fronts):
    engines = await start(num_fronts=num_fronts)
    engines = engines if num_fronts > 1 else [engines]
    results = await streams_over_deaths(engines, [signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL])
    assert results == [answer(seed) for seed in range(1, 17)]
    assert not any(engine.core.processor.num_open for engine in engines)


@pytest.mark.slow
async def test_without_the_given_tokens_streams_would_have_them_twice(start):
    engine = await start()
    with patch.object(SampledRequest, "resume", lambda self, asked: asked):
        results = await streams_over_deaths([engine], [signal.SIGKILL])
    assert results != [answer(seed) for seed in range(1, 17)]


async def test_sequences_of_one_request_and_whoever_comes_meanwhile(start):
    engine = await start(delay_s=0.3)
    params = SamplingParams(n=3, max_tokens=NUM_TOKENS, seed=5, detokenize=False)

    async def last():
        return [output async for output in engine.generate([5, 2], params)][-1]

    undisturbed = await last()
    run, ticket = asyncio.create_task(last()), engine.reserve()
    await asyncio.sleep(0.2)
    os.kill(pid_of(engine), signal.SIGKILL)
    while engine.core.health().state != "restarting":
        await asyncio.sleep(0.01)
    with pytest.raises(EngineDead):
        engine.reserve()
    late = asyncio.create_task(tokens_of(engine, 9, ticket=ticket))
    gone = asyncio.create_task(tokens_of(engine, 8, "gone", ticket=ticket))
    await asyncio.sleep(0.1)
    await engine.abort("gone")
    assert (await gone)[1] == "abort"
    assert (await late) == answer(9), "it had its place, and waited with the others"
    ticket.release()
    replayed = await run
    assert [c.token_ids for c in replayed.outputs] == [c.token_ids for c in undisturbed.outputs]
    assert len({tuple(c.token_ids) for c in replayed.outputs}) == 3


async def test_time_runs_on_while_no_core_is_there(start):
    engine = await start(delay_s=20.0)
    run = asyncio.create_task(tokens_of(engine, 3, timeout_s=1.0))
    await asyncio.sleep(0.2)
    os.kill(pid_of(engine), signal.SIGKILL)
    begun_s = time.monotonic()
    tokens, reason = await run
    assert reason == "timeout" and tokens == answer(3)[0][: len(tokens)]
    assert time.monotonic() - begun_s < 3


async def test_the_deadly_one_ends_and_the_others_go_on(start):
    free = set(range(3, 256)).difference(*(answer(seed)[0] for seed in range(1, 9)))
    deadly = max(free)
    engine = await start(deadly=deadly)
    runs = [asyncio.create_task(tokens_of(engine, seed)) for seed in range(1, 9)]
    await asyncio.sleep(0.2)
    params = SamplingParams(max_tokens=5, seed=1, detokenize=False)

    async def kill():
        return [output async for output in engine.generate([deadly, 7], params)][-1].outputs[0]

    culprit = await asyncio.wait_for(kill(), 30)
    assert culprit.finish_reason == "error" and "died of this request" in culprit.error
    assert await asyncio.gather(*runs) == [answer(seed) for seed in range(1, 9)]
    assert engine.core.health().num_restarts == 4
    with pytest.raises(RequestError, match="twice when the engine died"):
        await kill()


async def test_when_no_other_core_comes_all_are_told(start):
    engine = await start(delay_s=None)
    runs = [asyncio.create_task(tokens_of(engine, seed)) for seed in range(1, 5)]
    await asyncio.sleep(0.2)
    os.kill(pid_of(engine), signal.SIGKILL)
    results = await asyncio.gather(*runs, return_exceptions=True)
    assert all(isinstance(result, EngineDead) for result in results)


async def test_requests_of_a_lost_replica_go_on_in_another(start):
    engine = await start(replicas=2)
    runs = [asyncio.create_task(tokens_of(engine, seed)) for seed in range(1, 13)]
    await asyncio.sleep(0.2)
    os.kill(pid_of(engine, 0), signal.SIGKILL)
    assert await asyncio.wait_for(asyncio.gather(*runs), 15) == [answer(seed) for seed in range(1, 13)]


@pytest.mark.slow
async def test_requests_wait_while_no_replica_is_there(start):
    engine = await start(replicas=2, delay_s=0.3)
    runs = [asyncio.create_task(tokens_of(engine, seed)) for seed in range(1, 9)]
    pinned = asyncio.create_task(tokens_of(engine, 20, data_parallel_rank=1))
    await asyncio.sleep(0.2)
    for replica in (0, 1):
        os.kill(pid_of(engine, replica), signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*runs, pinned), 15)
    assert results == [answer(seed) for seed in (*range(1, 9), 20)]
