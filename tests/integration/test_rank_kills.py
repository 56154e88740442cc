"""Any process of an engine with ranks is killed or stopped at any time under load: requests go on, exactly.

OCTAVO_KILLS=50 says how often, OCTAVO_KILLS_TIMEOUT how many seconds each may take; a soak, which prints how
long it took until the engine was back. Fakes for ranks show that whatever was under way goes on; ranks of a
small model also wait for each other.

Runs with --whole alone; tests/integration/test_faults_core.py has the parts.
"""

import asyncio
import contextlib
import dataclasses
import mmap
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from octavo import AsyncLLM, EngineArgs, SamplingParams, TokensPrompt
from octavo.config import resolve
from octavo.frontend.client.restart import RestartPolicy
from tests.fakes import expected_output, fake_request
from tests.process_fakes import EXACT_RANKS, is_alive, process_config, wait_until

KILLS = int(os.environ.get("OCTAVO_KILLS", "3"))
LONGEST_S = int(os.environ.get("OCTAVO_KILLS_TIMEOUT", "60"))
"""For a machine with more to do than it can: a larger one shows only that all answers are exact."""
BACK_S = LONGEST_S / 6


SHARED = Path("/dev/shm")


def shared_by(processes):
    """The files of shared memory that these have open or mapped: not those of other engines."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {Path(part.path) for part in [*process.memory_maps(), *process.open_files()]}
    return {path for path in found if path.is_relative_to(SHARED)}


def wanted_of_fakes(seed):
    """What an engine of fakes that never died gives."""
    return expected_output(fake_request("", [seed % 100, 2], 30, seed=seed), 64)[0]


@pytest.fixture(params=["fakes", "model"])
async def engine(request, tmp_path, tiny_llama, make_llm, monkeypatch):
    """Two ranks that restart as often as need be, and what they answer; nothing of them is left."""
    if request.param == "fakes":
        config, wanted = process_config(EXACT_RANKS, tp=2, step_s=0.004), wanted_of_fakes
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, skip_tokenizer_init=True)
        )
    else:
        options = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 64}
        options |= {"cpu_threads": 1, "tensor_parallel_size": 2}
        llm = make_llm(tiny_llama, **options)
        prompts = [TokensPrompt(prompt_token_ids=[first, 2]) for first in range(100)]
        params = [SamplingParams(max_tokens=30, seed=7, detokenize=False, ignore_eos=True)] * 100
        found = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        llm.shutdown()
        config = resolve(EngineArgs(model=str(tiny_llama), **options))
        wanted = lambda seed: found[seed % 100]  # noqa: E731
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(RestartPolicy, "delay_s", lambda _: 0.0)
    front = dataclasses.replace(config.front, stall_timeout=4.0)
    engine = AsyncLLM(dataclasses.replace(config, front=front), on_crash="replay")
    await engine.start()
    shared = set()
    yield engine, wanted, shared
    left = processes(engine)
    shared |= shared_by(left)
    await engine.shutdown()
    assert wait_until(lambda: not any(is_alive(process.pid) for process in left), 5)
    assert wait_until(lambda: list(tmp_path.iterdir()) == [], 5)
    assert not [path for path in shared if path.exists()]


def processes(engine):
    """The core and its ranks."""
    core = psutil.Process(engine.core.client._core.pid)
    return [core, *core.children(recursive=True)]


async def ask(engine, wanted, seed):
    """One answer, which must be what an engine that never died gives."""
    own = seed if wanted is wanted_of_fakes else 7
    params = SamplingParams(max_tokens=30, seed=own, detokenize=False, ignore_eos=True)
    outputs = [output async for output in engine.generate([seed % 100, 2], params)]
    assert outputs[-1].outputs[0].token_ids == wanted(seed)


@pytest.mark.slow
@pytest.mark.timeout((1 + KILLS) * LONGEST_S)
async def test_whoever_dies_or_hangs_requests_go_on(engine):
    (engine, wanted, shared), chance, is_over, num_answers = engine, random.Random(), False, 0
    has_collectives = wanted is not wanted_of_fakes

    async def keep_asking(number):
        nonlocal num_answers
        while not is_over:
            number += 6
            await ask(engine, wanted, number)
            num_answers += 1

    clients = [asyncio.create_task(keep_asking(number)) for number in range(6)]
    back_s, hung_s = [], []
    for number in range(KILLS):
        await asyncio.sleep(chance.uniform(0, 0.5))
        before, num_restarts = processes(engine), engine.core.health().num_restarts
        shared |= shared_by(before)
        is_stop = number % 8 == 1
        alike = [p for p in before[1:] if has_collectives or p.cmdline()[-3] == "0"]  # fakes do not wait
        victim = chance.choice(alike if is_stop else before)
        os.kill(victim.pid, signal.SIGSTOP if is_stop else signal.SIGKILL)
        began = time.monotonic()
        async with asyncio.timeout(LONGEST_S):
            while engine.core.health().num_restarts <= num_restarts:
                await asyncio.sleep(0.01)
            await ask(engine, wanted, 10_000 + number)
        (hung_s if is_stop else back_s).append(time.monotonic() - began)
        assert not any(is_alive(process.pid) for process in before), "the old ones are gone"
    is_over = True
    await asyncio.gather(*clients)
    assert num_answers > KILLS
    median_s = statistics.median(back_s)
    print(f"{KILLS} faults, {num_answers} answers; back after {median_s:.1f} s, at most {max(back_s):.1f} s")
    print(f"behind a rank that hung: {', '.join(f'{s:.1f}' for s in hung_s)} s, of which 4 to find it")
    assert median_s < BACK_S


@pytest.mark.skipif(not SHARED.is_dir(), reason="there is no shared memory in files")
def test_what_a_process_shares_is_seen():
    with tempfile.NamedTemporaryFile(dir=SHARED) as mapped, tempfile.NamedTemporaryFile(dir=SHARED) as other:
        mapped.write(bytes(mmap.PAGESIZE))
        mapped.flush()
        with mmap.mmap(mapped.fileno(), 0):
            mapped.file.close()
            assert Path(mapped.name) in (found := shared_by([psutil.Process()]))
        other.file.close()
        assert Path(other.name) in found and Path(other.name) not in shared_by([psutil.Process()])
