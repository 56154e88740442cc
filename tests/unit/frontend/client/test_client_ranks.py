"""Front, core and ranks, each in its own process: whoever dies, all are gone and nothing is left."""

import asyncio
import os
import signal
import time

import pytest

from octavo.base.errors import ConfigError, EngineDead
from octavo.frontend.client.zmq import AsyncClient
from tests.fakes import fake_request
from tests.process_fakes import RANKS, is_alive, process_config, wait_until


@pytest.fixture(autouse=True)
def tmpdir_of_its_own(tmp_path, monkeypatch):
    """Nothing may be left there, neither the front's mailbox nor the core's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert wait_until(lambda: list(tmp_path.iterdir()) == [], 5)


@pytest.fixture
async def client():
    client = AsyncClient(process_config(RANKS, tp=2))
    await client.start()
    yield client
    await client.close()


async def rank_pids(client):
    return [answer[1] for answer in await client.call("collective_rpc", {"verb": "whoami"})]


REST = (1, True), (0, False)


async def run_until_dead(client):
    async for _ in client.outputs():
        pass


async def test_requests_and_close(client):
    pids = await rank_pids(client)
    assert len({os.getpid(), client._core.pid, *pids}) == 4
    client.add(fake_request("a", [1, 2, 3], 6))
    num_tokens = 0
    async for step in client.outputs():
        num_tokens += sum(len(output.new_token_ids) for output in step.outputs)
        if any(output.finish_reason for output in step.outputs):
            break
    assert num_tokens == 6
    await client.close()
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(
    ("rank", "idle"), [(0, True), (1, False), *(pytest.param(*x, marks=pytest.mark.slow) for x in REST)]
)
async def test_a_killed_rank_ends_the_engine(client, rank, idle):
    pids = await rank_pids(client)
    os.kill(pids[rank], signal.SIGKILL)
    began = time.monotonic()
    if not idle:
        client.add(fake_request("a", [1, 2, 3], 50))
    with pytest.raises(EngineDead, match=f"rank {rank} ended with exit code -9"):
        await asyncio.wait_for(run_until_dead(client), 2)
    assert time.monotonic() - began < 2
    await client.close()
    assert not any(map(is_alive, pids))


async def test_a_killed_core_takes_its_ranks_along(client):
    pids = await rank_pids(client)
    os.kill(client._core.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="exit code -9"):
        await asyncio.wait_for(run_until_dead(client), 1)
    assert wait_until(lambda: not any(map(is_alive, pids)), 5)


async def test_a_config_error_of_a_rank_reaches_the_user():
    client = AsyncClient(process_config(RANKS, tp=2, fault="load:config", fault_rank=1))
    with pytest.raises(ConfigError, match=r"^the option is wrong$"):
        await client.start()
