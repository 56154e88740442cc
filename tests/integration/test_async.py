"""AsyncLLM: the engine core in a process of its own, many requests at once."""

import asyncio
import os
import signal
import time

import pytest

from octavo import AsyncLLM, EngineArgs, EngineDead, RequestError, RequestOutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


@pytest.fixture
async def engine(tiny_llama):
    args = EngineArgs(
        model=str(tiny_llama), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=200
    )
    engine = AsyncLLM.from_engine_args(args)
    yield engine
    await engine.shutdown()


async def collect(engine, prompt, params, request_id=None):
    return [output async for output in engine.generate(prompt, params, request_id)]


async def test_the_same_tokens_as_offline(engine, tiny_llama, make_llm):
    prompts = [[i + 1] * (5 + i) for i in range(6)]
    streams = await asyncio.gather(*(collect(engine, prompt, GREEDY) for prompt in prompts))
    expected = make_llm(tiny_llama).generate(prompts, GREEDY, use_tqdm=False)
    for outputs, whole in zip(streams, expected, strict=True):
        assert outputs[-1].finished
        assert not any(output.finished for output in outputs[:-1])
        assert outputs[-1].outputs[0].token_ids == whole.outputs[0].token_ids


async def test_deltas_add_up(engine):
    params = SamplingParams(
        max_tokens=20, seed=1, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    outputs = await collect(engine, [1, 2, 3], params)
    whole = await collect(
        engine, [1, 2, 3], SamplingParams(max_tokens=20, seed=1, ignore_eos=True, detokenize=False)
    )
    joined = [token for output in outputs for token in output.outputs[0].token_ids]
    assert joined == whole[-1].outputs[0].token_ids
    assert len(outputs) > 1


async def test_abort_and_leaving_early(engine):
    long = SamplingParams(max_tokens=400, ignore_eos=True, detokenize=False)
    outputs = []
    async for output in engine.generate([1, 2], long, "mine"):
        outputs.append(output)
        if len(outputs) == 3:
            await engine.abort("mine")
            await engine.abort(["mine", "never heard of"])
    assert outputs[-1].outputs[0].finish_reason == "abort"
    stream = engine.generate([1, 2], long)
    await anext(stream)
    await stream.aclose()
    await collect(engine, [5], GREEDY)
    assert engine.core.stats.num_running == 0
    assert engine.core.stats.num_blocks_used == 0


async def test_a_refused_request_disturbs_nobody(engine):
    running = asyncio.create_task(collect(engine, [7, 8, 9], GREEDY))
    with pytest.raises(RequestError):
        await collect(engine, [10**9], GREEDY)
    both = await asyncio.gather(*(collect(engine, [3], GREEDY, "twice") for _ in range(2)))
    assert both[0][-1].outputs[0].token_ids == both[1][-1].outputs[0].token_ids
    assert (await running)[-1].finished


async def test_the_core_is_killed(engine):
    long = SamplingParams(max_tokens=400, ignore_eos=True, detokenize=False)
    tasks = [asyncio.create_task(collect(engine, [i], long)) for i in range(1, 9)]
    await engine.start()
    await asyncio.sleep(0.2)
    os.kill(engine.core.client._core.pid, signal.SIGKILL)
    begun_s = time.monotonic()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert time.monotonic() - begun_s < 1.0
    assert all(isinstance(result, EngineDead) for result in results)
    assert engine.errored
    with pytest.raises(EngineDead):
        await collect(engine, [1], GREEDY)
    with pytest.raises(EngineDead):
        await engine.check_health()


async def test_a_plain_call_shuts_down(engine):
    """vLLM's is no coroutine."""
    stream = engine.generate([1, 2], SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False))
    await anext(stream)
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        while True:
            await asyncio.wait_for(anext(stream), 20)


def test_another_event_loop(tiny_llama):
    args = EngineArgs(model=str(tiny_llama), skip_tokenizer_init=True, num_gpu_blocks_override=200)
    engine = AsyncLLM.from_engine_args(args)
    with asyncio.Runner() as runner:
        assert runner.run(collect(engine, [1, 2], GREEDY))[-1].finished
        with pytest.raises(RequestError, match="started on another event loop"), asyncio.Runner() as other:
            other.run(asyncio.wait_for(collect(engine, [1, 2], GREEDY), 20))
        runner.run(_end(engine))


async def _end(engine):
    await engine.shutdown()
