"""What goes wrong in the work for one request ends that request; its mates answer as they do alone."""

import asyncio
import dataclasses
import os
import signal

import pytest

from octavo import AsyncLLM, EngineArgs, RequestError, RequestOutputKind, SamplingParams
from octavo.base import faults
from octavo.base.errors import Overloaded
from octavo.config import EngineConfig, FrontConfig
from octavo.frontend.admission.preparation import Preparation
from octavo.frontend.requests.open_request import SampledRequest
from tests.fakes import ByteTokenizer, expected_output, fake_request
from tests.process_fakes import process_config

NUM_MATES = 8


@pytest.fixture(autouse=True)
def disarm():
    yield
    faults.arm("")


@pytest.fixture
async def start(monkeypatch):
    monkeypatch.setattr("octavo.frontend.async_engine.tokenizer_for", lambda config: ByteTokenizer())
    engines = []

    async def start(**orders):
        engines.append(AsyncLLM(process_config(**orders)))
        await engines[-1].start()
        return engines[-1]

    yield start
    for engine in engines:
        await engine.shutdown()


def params(seed, **fields):
    return SamplingParams(max_tokens=20, seed=seed, **fields)


def expected(seed):
    """The text that request number `seed` must have, made without an engine."""
    ids, _, _ = expected_output(fake_request("", [seed, 2], 20, seed=seed), 64)
    return ByteTokenizer().decode(ids)


async def collect(engine, seed, **fields):
    outputs = [output async for output in engine.generate([seed, 2], params(seed, **fields))]
    assert [output.finished for output in outputs].count(True) == 1
    return outputs


async def one_failed(engine, **fields):
    """Run mates together; the others are as expected. Returns the completion of the one that failed."""
    runs = await asyncio.gather(*(collect(engine, seed, **fields) for seed in range(1, NUM_MATES + 1)))
    last = {seed: outputs[-1].outputs[0] for seed, outputs in enumerate(runs, start=1)}
    failed = {seed: completion for seed, completion in last.items() if completion.finish_reason == "error"}
    for seed in last.keys() - failed.keys():
        text = "".join(output.outputs[0].text for output in runs[seed - 1])
        assert (text, last[seed].finish_reason) == (expected(seed), "length")
    [(seed, completion)] = failed.items()
    assert completion.error.startswith("Internal error while")
    assert engine.core.stats.num_running == 0 or await _is_idle(engine)
    assert (await collect(engine, seed))[-1].outputs[0].text == expected(seed)
    return completion


async def _is_idle(engine):
    await asyncio.sleep(0.1)
    return (await engine.core.call("stats"))["num_blocks_used"] == 0


@pytest.mark.parametrize("site", ["detok", "logprobs"])
async def test_an_output_that_cannot_be_read(start, site):
    """Of a front that is behind, all steps of a mate may be read as one: more often is not sure."""
    engine = await start()
    faults.arm(f"{site}:raise@{NUM_MATES}")
    await one_failed(engine, output_kind=RequestOutputKind.DELTA, logprobs=1)


async def test_an_output_that_cannot_be_sent(start, monkeypatch):
    monkeypatch.setenv("OCTAVO_FAULT", "out.encode:raise@29")
    engine = await start()
    completion = await one_failed(engine, output_kind=RequestOutputKind.DELTA)
    assert completion.error == "Internal error while sending the output of this request."


async def test_an_output_that_cannot_be_made(start, monkeypatch):
    engine = await start()
    make_output = SampledRequest.make_output

    def fail_late(request):
        if request.params.seed == 3 and request.stats.num_generation_tokens > 5:
            raise RuntimeError("no output")
        return make_output(request)

    monkeypatch.setattr(SampledRequest, "make_output", fail_late)
    runs = await asyncio.gather(*(collect(engine, seed) for seed in range(1, NUM_MATES + 1)))
    for seed, outputs in enumerate(runs, start=1):
        completion = outputs[-1].outputs[0]
        if seed == 3:
            assert (completion.finish_reason, completion.text) == ("error", "")
        else:
            assert completion.text == expected(seed)
    assert engine.core.processor.num_open == 0
    assert await _is_idle(engine)


async def test_prompts_that_cannot_be_read(start):
    engine = await start()
    mate = asyncio.create_task(collect(engine, 1))
    faults.arm("tokenize:raise@1")
    with pytest.raises(faults.Fault):
        async for _ in engine.generate("text", params(1)):
            pass
    assert (await mate)[-1].outputs[0].text == expected(1)
    assert engine.admission.num_sequences == 0


async def test_a_prompt_that_takes_too_long_holds_nobody_up(start):
    engine = await start()
    engine._preparation = Preparation(0.2, num_threads=2)
    faults.arm("tokenize:sleep=0.6@1")
    with pytest.raises(RequestError, match=r"more than 0\.2 s"):
        async for _ in engine.generate("text", params(1)):
            pass
    assert (await collect(engine, 1))[-1].outputs[0].text == expected(1)
    assert engine.admission.num_sequences == 0


async def test_threads_that_are_lost_are_not_replaced():
    preparation = Preparation(0.1, num_threads=1)
    faults.arm("tokenize:sleep=0.5@1")
    jobs = [asyncio.create_task(preparation.run(lambda: faults.hit("tokenize"))) for _ in range(3)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert [type(result) for result in results] == [RequestError, Overloaded, Overloaded]
    await asyncio.sleep(0.5)
    assert await preparation.run(lambda: 7) == 7


@pytest.mark.parametrize("is_running", [True, False])
async def test_time_limits(start, is_running):
    engine = await start(step_s=0.05)
    if not is_running:
        await engine.pause_generation(mode="keep")
    outputs = await asyncio.wait_for(collect(engine, 1, timeout_s=0.3), 5)
    completion = outputs[-1].outputs[0]
    assert completion.finish_reason == "timeout"
    assert expected(1).startswith(completion.text)
    assert bool(completion.token_ids) == is_running


async def test_the_engines_time_limit(monkeypatch):
    monkeypatch.setattr("octavo.frontend.async_engine.tokenizer_for", lambda config: ByteTokenizer())
    config: EngineConfig = process_config(step_s=0.05)
    scheduler = dataclasses.replace(config.scheduler, max_request_seconds=0.3)
    engine = AsyncLLM(dataclasses.replace(config, scheduler=scheduler, front=FrontConfig()))
    outputs = await asyncio.wait_for(collect(engine, 1), 10)
    assert outputs[-1].outputs[0].finish_reason == "timeout"
    await engine.shutdown()


async def test_the_wall_clock_means_nothing(start, monkeypatch):
    engine = await start(step_s=0.02)
    running = asyncio.create_task(collect(engine, 1, timeout_s=5.0))
    await asyncio.sleep(0.1)
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert (await running)[-1].outputs[0].text == expected(1)
    latency = engine.metrics.request_latency
    assert 0 < latency.sum < 10


async def test_every_way_out_gives_the_place_back(start):
    engine = await start(step_s=0.02)
    faults.arm("tokenize:raise@1")

    async def leave_early():
        async for _ in (stream := engine.generate([1], params(1))):
            await stream.aclose()

    async def be_cancelled():
        running = asyncio.create_task(collect(engine, 1))
        await asyncio.sleep(0.1)
        running.cancel()
        await running

    async def be_aborted():
        running = asyncio.create_task(collect(engine, 1))
        await asyncio.sleep(0.1)
        await engine.abort(next(iter(engine.core.processor._keys)))
        await running

    async def fail_to_tokenize():
        async for _ in engine.generate("text", params(1)):
            pass

    async def be_wrong():
        async for _ in engine.generate([10**9], params(1)):
            pass

    ways = (leave_early, be_cancelled, be_aborted, fail_to_tokenize, be_wrong)
    await asyncio.gather(*(way() for way in ways), return_exceptions=True)
    assert engine.admission.num_sequences == engine.admission.num_waiting_tokens == 0
    dying = [asyncio.create_task(collect(engine, seed)) for seed in (1, 2)]
    await asyncio.sleep(0.1)
    assert engine.admission.num_sequences == 2
    os.kill(engine.core.client._core.pid, signal.SIGKILL)
    await asyncio.gather(*dying, return_exceptions=True)
    assert engine.admission.num_sequences == 0


@pytest.fixture
async def start_real(tiny_llama, monkeypatch):
    engines = []

    async def start(fault):
        monkeypatch.setenv("OCTAVO_FAULT", fault)
        options = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 200}
        engines.append(AsyncLLM.from_engine_args(EngineArgs(model=str(tiny_llama), **options)))
        await engines[-1].start()
        return engines[-1]

    yield start
    for engine in engines:
        await engine.shutdown()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("worker.forward:nan=2@9", "numerics"),
        ("worker.sample:raise@3", "Penalties failed"),
    ],
)
async def test_faults_of_one_row_of_a_real_model(start_real, fault, text):
    engine = await start_real(fault)
    wanted = SamplingParams(
        max_tokens=24, temperature=0, ignore_eos=True, presence_penalty=1.0, detokenize=False
    )

    async def run(seed):
        return [output async for output in engine.generate([seed, 2], wanted)][-1].outputs[0]

    together = await asyncio.gather(*map(run, range(1, 9)))
    alone = [await run(seed) for seed in range(1, 9)]
    [failed] = [seed for seed, completion in enumerate(together) if completion.finish_reason == "error"]
    assert text in together[failed].error
    for seed, completion in enumerate(together):
        if seed != failed:
            assert completion.token_ids == alone[seed].token_ids
            assert completion.finish_reason == "length"
    assert (await engine.core.call("stats"))["num_blocks_used"] == 0
