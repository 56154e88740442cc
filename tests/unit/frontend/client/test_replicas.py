"""Two replicas in processes of their own: one is killed under load, the other does not notice."""

import asyncio
import dataclasses
import os
import signal

import pytest

from octavo import AsyncLLM, EngineDead, RequestError, SamplingParams
from octavo.base.errors import ConfigError, Unsupported
from octavo.frontend.client.balanced import make_client
from octavo.frontend.observe.engine_metrics import EngineMetrics
from tests.fakes import expected_output, fake_request
from tests.process_fakes import is_alive, process_config, wait_until


def replicas_config(count=2, elastic=False, shares=False, **orders):
    config = process_config(**orders)
    model = dataclasses.replace(config.model, skip_tokenizer_init=True)
    parallel = dataclasses.replace(config.parallel, data_parallel_size=count, enable_elastic_ep=elastic)
    parallel = dataclasses.replace(parallel, enable_expert_parallel=shares)
    return dataclasses.replace(config, model=model, parallel=parallel)


@pytest.fixture
async def start(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engines = []

    async def make(on_crash="restart", **orders):
        engine = AsyncLLM(replicas_config(**orders), on_crash=on_crash)
        engines.append(engine)
        await asyncio.wait_for(engine.start(), 20)
        return engine

    yield make
    for engine in engines:
        await engine.shutdown()
    assert wait_until(lambda: list(tmp_path.iterdir()) == [], 5), "sockets are left"


async def collect(engine, seed, max_tokens=20, **about):
    params = SamplingParams(max_tokens=max_tokens, seed=seed, detokenize=False)
    outputs = [output async for output in engine.generate([seed, 2], params, **about)]
    return outputs[-1].outputs[0]


def answer(seed, max_tokens=20):
    return expected_output(fake_request("", [seed, 2], max_tokens, seed=seed), 64)[0]


def pids(engine):
    return [door._core.pid for door in engine.core.client.doors]


async def totals(engine, name):
    """A metric of each engine, by vLLM's label."""
    found = [m for m in await engine.get_metrics() if m.name == f"vllm:{name}"]
    return {m.labels["engine"]: m.value for m in found}


async def test_a_killed_replica_comes_back_while_the_other_serves(start):
    engine = await start(step_s=0.01)
    runs = [asyncio.create_task(collect(engine, seed, 60)) for seed in range(1, 13)]
    await asyncio.sleep(0.3)
    before = pids(engine)
    os.kill(before[0], signal.SIGKILL)
    ends = await asyncio.wait_for(asyncio.gather(*runs), 10)
    served = [seed for seed, end in enumerate(ends, 1) if end.finish_reason == "length"]
    assert [end.finish_reason for end in ends].count("error") == 6
    assert all(ends[seed - 1].token_ids == answer(seed, 60) for seed in served)
    assert len(served) == 6
    assert (await collect(engine, 40)).token_ids == answer(40), "the other serves at once"
    async with asyncio.timeout(10):
        while (await totals(engine, "engine_restarts"))["0"] != 1:
            await asyncio.sleep(0.05)
    after = pids(engine)
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert not is_alive(before[0])
    assert engine.core.health().num_restarts == 1
    ends = await asyncio.gather(*(collect(engine, seed) for seed in range(1, 9)))
    assert [end.token_ids for end in ends] == [answer(seed) for seed in range(1, 9)]
    tokens = await totals(engine, "generation_tokens")
    assert tokens.keys() == {"0", "1"}
    assert min(tokens.values()) > 0


async def test_verbs_go_to_all_and_a_rank_may_be_asked_for(start):
    engine = await start()
    assert [pid for name, _, pid in zip(*[iter(await engine.collective_rpc("ping"))] * 3, strict=True)] == [
        *pids(engine)
    ]
    await engine.pause_generation("keep", clear_cache=False)
    assert await engine.is_paused()
    assert all([await door.call("is_paused") for door in engine.core.client.doors])
    await engine.resume_generation()
    assert (await collect(engine, 5, data_parallel_rank=1)).token_ids == answer(5)
    tokens = await totals(engine, "generation_tokens")
    assert tokens == {"0": 0, "1": 20}
    with pytest.raises(RequestError, match=r"data_parallel_rank 2 is out of range \[0, 2\)"):
        await collect(engine, 5, data_parallel_rank=2)


async def back(engine, index, before):
    """Wait until another core serves in the place of this one."""
    async with asyncio.timeout(20):
        while pids(engine)[index] == before or not engine.core.client._balancer.loads[index].is_up:
            await asyncio.sleep(0.02)


async def test_a_replica_that_refuses_what_others_did_starts_again_as_they_are(start, tmp_path_factory):
    refuses = tmp_path_factory.mktemp("orders") / "refuses"
    engine = await start(refuses=str(refuses))
    before, doors = pids(engine), engine.core.client.doors
    refuses.touch()
    with pytest.raises(RequestError, match="told to refuse"):
        await engine.collective_rpc("ping")
    assert pids(engine) == before, "a verb that changes nothing harms nobody"
    refuses.touch()
    with pytest.raises(RequestError, match="told to refuse"):
        await engine.sleep()
    await back(engine, 1, before[1])
    assert [await door.call("is_sleeping") for door in doors] == [["kv_cache", "weights"]] * 2
    await engine.wake_up()
    assert not any([await door.call("is_paused") for door in doors])
    for rank in (0, 1):
        assert (await collect(engine, 5, data_parallel_rank=rank)).token_ids == answer(5)
    assert engine.core.health().num_restarts == 1


async def test_a_replica_that_died_comes_back_paused_as_the_others_are(start):
    engine = await start()
    before, doors = pids(engine), engine.core.client.doors
    await engine.pause_generation("keep", clear_cache=False)
    os.kill(before[1], signal.SIGKILL)
    await back(engine, 1, before[1])
    assert [await door.call("is_paused") for door in doors] == [True, True]
    asked = [asyncio.create_task(collect(engine, 5, data_parallel_rank=rank)) for rank in (0, 1)]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in asked)
    await engine.resume_generation()
    assert [end.token_ids for end in await asyncio.gather(*asked)] == [answer(5)] * 2


async def test_without_restarts_the_rest_serves_until_none_is_left(start):
    engine = await start("none", step_s=0.01)
    os.kill(pids(engine)[1], signal.SIGKILL)
    async with asyncio.timeout(5):
        while engine.core.client._balancer.loads[1].is_up:
            await asyncio.sleep(0.01)
    assert (await collect(engine, 3)).token_ids == answer(3)
    with pytest.raises(EngineDead, match="restarted"):
        await collect(engine, 3, data_parallel_rank=1)
    os.kill(pids(engine)[0], signal.SIGKILL)
    await asyncio.wait_for(engine.core.wait_until_dead(), 5)
    with pytest.raises(EngineDead):
        await collect(engine, 3)


async def test_replicas_that_share_experts_end_together(start):
    engine = await start("none", step_s=0.01, shares=True)
    before = pids(engine)
    os.kill(before[1], signal.SIGKILL)
    await asyncio.wait_for(engine.core.wait_until_dead(), 5)
    assert wait_until(lambda: not any(map(is_alive, before)), 5)
    with pytest.raises(EngineDead):
        await collect(engine, 3)


async def test_replicas_that_share_experts_come_back_together(start):
    engine = await start(step_s=0.01, shares=True)
    doors = engine.core.client.doors
    for victim in (1, 0):
        before = pids(engine)
        os.kill(before[victim], signal.SIGKILL)
        async with asyncio.timeout(20):
            while {None, *before} & {*(now := [door._core and door._core.pid for door in doors])}:
                await asyncio.sleep(0.05)
            while not all(load.is_up for load in engine.core.client._balancer.loads):
                await asyncio.sleep(0.05)
        assert not any(map(is_alive, before))
        assert pids(engine) == now, "each was started once"
        ends = await asyncio.gather(*(collect(engine, seed) for seed in range(1, 9)))
        assert [end.token_ids for end in ends] == [answer(seed) for seed in range(1, 9)]


async def test_one_that_cannot_start_ends_all(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = AsyncLLM(replicas_config(fault="load:config"))
    with pytest.raises(ConfigError, match="the option is wrong"):
        await asyncio.wait_for(engine.start(), 20)
    await engine.shutdown()
    assert wait_until(lambda: list(tmp_path.iterdir()) == [], 5)


async def test_several_api_processes_are_refused():
    with pytest.raises(ConfigError, match="api_server_count=2 with data_parallel_size=2"):
        AsyncLLM(replicas_config(), num_fronts=2)


async def test_replicas_are_added_and_drained_under_load(start):
    engine = await start(count=1, elastic=True, step_s=0.01)
    first = [asyncio.create_task(collect(engine, seed, 60)) for seed in range(1, 7)]
    await engine.scale_elastic_ep(3)
    assert len(pids(engine)) == 3
    assert (await collect(engine, 5, data_parallel_rank=2)).token_ids == answer(5)
    more = [asyncio.create_task(collect(engine, seed, 60)) for seed in range(7, 25)]
    await asyncio.sleep(0.2)
    tokens = await totals(engine, "generation_tokens")
    assert tokens.keys() == {"0", "1", "2"}
    assert min(tokens.values()) > 0, "the new ones serve"
    gone = pids(engine)[1:]
    await engine.scale_elastic_ep(1)
    ends = await asyncio.wait_for(asyncio.gather(*first, *more), 20)
    assert [end.token_ids for end in ends] == [answer(seed, 60) for seed in range(1, 25)]
    assert not any(map(is_alive, gone))
    assert engine.core.health().num_restarts == 0
    with pytest.raises(RequestError, match=r"data_parallel_rank 2 is out of range \[0, 1\)"):
        await collect(engine, 5, data_parallel_rank=2)


@pytest.mark.parametrize("on_crash", ["replay", "restart"])
async def test_what_is_not_done_in_time_goes_on_elsewhere_or_ends(start, on_crash):
    engine = await start(on_crash, step_s=0.01)
    runs = [asyncio.create_task(collect(engine, seed, 90)) for seed in range(1, 9)]
    await asyncio.sleep(0.3)
    await engine.scale_elastic_ep(1, drain_timeout=0)
    ends = await asyncio.wait_for(asyncio.gather(*runs), 20)
    right = [end.token_ids == answer(seed, 90) for seed, end in enumerate(ends, 1)]
    assert right.count(True) == (8 if on_crash == "replay" else 4)
    assert [end.finish_reason for end in ends].count("error") == 8 - right.count(True)


async def test_sizes_that_cannot_be_are_refused_and_nothing_changes(start):
    engine = await start()
    for count in (0, True, "3"):
        with pytest.raises(RequestError, match="new_data_parallel_size must be at least 1"):
            await engine.scale_elastic_ep(count)
    await engine.pause_generation("keep")
    with pytest.raises(RequestError, match="paused"):
        await engine.scale_elastic_ep(3)
    await engine.resume_generation()
    alone = await start(count=1)
    with pytest.raises(Unsupported, match="One replica stays one"):
        await alone.scale_elastic_ep(2)
    assert (await collect(engine, 5)).token_ids == answer(5)


async def test_servers_may_have_a_part_of_the_replicas_each(start):
    config = replicas_config(count=4)
    parallel = dataclasses.replace(
        config.parallel, data_parallel_hybrid_lb=True, data_parallel_size_local=2, data_parallel_start_rank=2
    )
    config = dataclasses.replace(config, parallel=parallel)
    assert [door._config.parallel.data_parallel_rank for door in make_client(config, False, 1).doors] == [
        2,
        3,
    ]
    labels = {metric.labels["engine"] for metric in EngineMetrics(config).snapshot()}
    assert labels == {"2", "3"}
