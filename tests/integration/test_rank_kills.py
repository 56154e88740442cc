"""Any process of an engine with ranks is killed or stopped at any time under load: requests go on, exactly.

OCTAVO_KILLS=50 says how often; a soak, which prints how long it took until the engine was back.

Runs with --whole alone; tests/integration/test_faults_core.py has the parts.
"""

import asyncio
import dataclasses
import os
import random
import signal
import statistics
import time
from pathlib import Path

import psutil
import pytest

from octavo import AsyncLLM, SamplingParams
from octavo.frontend.client.restart import RestartPolicy
from tests.fakes import expected_output, fake_request
from tests.process_fakes import EXACT_RANKS, is_alive, process_config, wait_until

KILLS = int(os.environ.get("OCTAVO_KILLS", "3"))
BACK_S = 10
"""A machine with more to do than it can may take longer now and then."""


@pytest.fixture
async def engine(tmp_path, monkeypatch):
    """Two ranks that restart as often as need be; nothing of them is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(RestartPolicy, "delay_s", lambda _: 0.0)
    shared, config = set(Path("/dev/shm").iterdir()), process_config(EXACT_RANKS, tp=2, step_s=0.004)
    model = dataclasses.replace(config.model, skip_tokenizer_init=True)
    front = dataclasses.replace(config.front, stall_timeout=4.0)
    engine = AsyncLLM(dataclasses.replace(config, model=model, front=front), on_crash="replay")
    await engine.start()
    yield engine
    left = processes(engine)
    await engine.shutdown()
    assert wait_until(lambda: not any(is_alive(process.pid) for process in left), 5)
    assert wait_until(lambda: list(tmp_path.iterdir()) == [], 5)
    assert set(Path("/dev/shm").iterdir()) <= shared


def processes(engine):
    """The core and its ranks."""
    core = psutil.Process(engine.core.client._core.pid)
    return [core, *core.children(recursive=True)]


async def ask(engine, seed):
    """One answer, which must be what an engine that never died gives."""
    params = SamplingParams(max_tokens=30, seed=seed, detokenize=False)
    outputs = [output async for output in engine.generate([seed % 200, 2], params)]
    wanted = expected_output(fake_request("", [seed % 200, 2], 30, seed=seed), 64)[0]
    assert outputs[-1].outputs[0].token_ids == wanted


@pytest.mark.slow
@pytest.mark.timeout(60 + 60 * KILLS)
async def test_whoever_dies_or_hangs_requests_go_on(engine):
    chance, is_over, num_answers = random.Random(), False, 0

    async def keep_asking(number):
        nonlocal num_answers
        while not is_over:
            number += 6
            await ask(engine, number)
            num_answers += 1

    clients = [asyncio.create_task(keep_asking(number)) for number in range(6)]
    back_s = []
    for number in range(KILLS):
        await asyncio.sleep(chance.uniform(0, 0.5))
        before, num_restarts = processes(engine), engine.core.health().num_restarts
        is_stop = number % 8 == 1  # of the rank that answers: these ranks do not wait for each other
        victim = chance.choice([p for p in before[1:] if p.cmdline()[-3] == "0"] if is_stop else before)
        os.kill(victim.pid, signal.SIGSTOP if is_stop else signal.SIGKILL)
        began = time.monotonic()
        async with asyncio.timeout(60):
            while engine.core.health().num_restarts <= num_restarts:
                await asyncio.sleep(0.01)
            await ask(engine, 10_000 + number)
        back_s.append(time.monotonic() - began)
        assert not any(is_alive(process.pid) for process in before), "the old ones are gone"
    is_over = True
    await asyncio.gather(*clients)
    assert num_answers > KILLS
    median_s = statistics.median(back_s)
    print(f"{KILLS} deaths, {num_answers} answers; back after {median_s:.1f} s, at most {max(back_s):.1f} s")
    assert median_s < BACK_S
