"""The operator's verbs on real models: sleep, profile, pause, drain, admission, constructors."""

import asyncio
import json

import pytest

from octavo import AsyncLLM, EngineArgs, LLMEngine, Overloaded, RequestError, SamplingParams, Unsupported
from octavo.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig
from octavo.metrics.names import PREFIX

PROMPTS = [[i + 1] * (5 + i) for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 200}


def tokens(llm, prompts=PROMPTS):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def held(llm):
    [described] = llm.collective_rpc("describe")
    return described["weight_bytes"], described["kv_cache_bytes"]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up(tiny_model, make_llm, level):
    llm = make_llm(tiny_model)
    before, (weights, cache) = tokens(llm), held(llm)
    llm.sleep(level)
    assert held(llm) == (0 if level == 2 else weights, 0)
    assert llm.is_sleeping()
    llm.wake_up(["weights"])
    assert held(llm) == (weights, 0)
    llm.wake_up()
    assert held(llm) == (weights, cache)
    assert tokens(llm) == before


@pytest.mark.parametrize("level", [0, 2])
def test_requests_survive_a_sleep(tiny_model, make_llm, level):
    llm = make_llm(tiny_model)
    expected = tokens(llm)
    llm.enqueue(PROMPTS, GREEDY)
    for _ in range(5):
        llm.llm_engine.step()
    llm.sleep(level, mode="keep")
    llm.wake_up()
    assert [o.outputs[0].token_ids for o in llm.wait_for_completion(use_tqdm=False)] == expected


def test_the_kv_cache_alone(tiny_llama, make_llm):
    llm = make_llm(tiny_llama)
    before, (weights, cache) = tokens(llm), held(llm)
    llm.release_kv_cache_memory()
    assert held(llm) == (weights, 0)
    llm.wake_up(["kv_cache"])
    assert held(llm) == (weights, cache)
    assert tokens(llm) == before


@pytest.mark.slow
def test_two_ranks_sleep(tiny_llama, make_llm):
    llm = make_llm(tiny_llama, tensor_parallel_size=2)
    before = tokens(llm)
    llm.sleep(2)
    assert [rank["weight_bytes"] for rank in llm.collective_rpc("describe")] == [0, 0]
    llm.wake_up()
    assert tokens(llm) == before
    with pytest.raises(Unsupported, match="functions are not sent"):
        llm.apply_model(type)


def test_a_profile_is_a_trace(tiny_llama, make_llm, tmp_path):
    llm = make_llm(tiny_llama, profiler_dir=str(tmp_path / "traces"))
    llm.start_profile("mine")
    with pytest.raises(ValueError, match="recorded already"):
        llm.start_profile()
    tokens(llm)
    [path] = llm.stop_profile()
    events = json.loads((tmp_path / "traces" / path).read_text())["traceEvents"]
    assert len(events) > 100
    with pytest.raises(ValueError, match="No profile"):
        llm.stop_profile()


def test_functions_see_worker_and_model(tiny_llama, make_llm):
    llm = make_llm(tiny_llama)
    [name] = llm.apply_model(lambda model: type(model).__name__)
    assert name == "Llama"
    assert llm.collective_rpc(lambda worker, a, b: [a, b], args=(1,), kwargs={"b": 2}) == [[1, 2]]


def test_six_configs_equal_the_flat_arguments(tiny_llama, make_llm):
    engine = LLMEngine(
        ModelConfig(model=str(tiny_llama), dtype="float32", skip_tokenizer_init=True),
        CacheConfig(num_gpu_blocks_override=200),
        ParallelConfig(),
        SchedulerConfig(max_num_seqs=4),
        DeviceConfig("cpu"),
        None,
        None,
    )
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt_token_ids=prompt, sampling_params=GREEDY)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {int(o.request_id): o.outputs[0].token_ids for o in engine.step() if o.finished}
    engine.shutdown()
    assert [outputs[i] for i in range(len(PROMPTS))] == tokens(make_llm(tiny_llama))


@pytest.fixture
async def make_engine(tiny_llama):
    opened = []

    def make(**options):
        opened.append(AsyncLLM.from_engine_args(EngineArgs(model=str(tiny_llama), **(OPTIONS | options))))
        return opened[-1]

    yield make
    for engine in opened:
        await engine.shutdown()


async def collect(engine, prompt, params=GREEDY):
    return [output async for output in engine.generate(prompt, params)][-1]


async def test_add_request_and_step(make_engine, tiny_llama, make_llm):
    engine = make_engine()
    ids = [await engine.add_request(prompt=prompt, sampling_params=GREEDY) for prompt in PROMPTS]
    finished = {}
    while len(finished) < len(ids):
        finished |= {output.request_id: output.outputs[0].token_ids for output in await engine.step()}
    assert [finished[request_id] for request_id in ids] == tokens(make_llm(tiny_llama))
    assert await engine.step() == []
    assert (engine.admission.num_sequences, engine.admission.num_waiting_tokens) == (0, 0)


async def test_fifty_requests_meet_a_bound(make_engine):
    engine = make_engine(max_num_seqs=4, max_num_queued_reqs=10)
    results = await asyncio.gather(*(collect(engine, [i + 1] * 9) for i in range(50)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, Overloaded)]
    assert len(refused) == 36
    assert all(error.retry_after_s >= 1 and "max_num_queued_reqs=10" in str(error) for error in refused)
    assert all(result.finished for result in results if not isinstance(result, Overloaded))
    assert (engine.admission.num_sequences, engine.admission.num_waiting_tokens) == (0, 0)
    [rejected] = [m for m in await engine.get_metrics() if m.name == PREFIX + "admission_rejections"]
    assert (rejected.value, rejected.labels["reason"]) == (36, "max_num_queued_reqs")
    assert (await collect(engine, [1])).finished


async def test_every_exit_gives_the_place_back(make_engine):
    engine = make_engine(max_num_queued_tokens=30)
    long = SamplingParams(max_tokens=400, ignore_eos=True, detokenize=False)
    with pytest.raises(ValueError):
        await collect(engine, [10**9])
    stream = engine.generate([1] * 25, long, "a")
    await anext(stream)
    await stream.aclose()
    task = asyncio.create_task(collect(engine, [2] * 25, long))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await engine.add_request("b", [3] * 5, long)
    await engine.abort("b")
    assert [output.request_id for output in await engine.step()] == ["b"]
    engine.check_admission(1, 30)
    assert (engine.admission.num_sequences, engine.admission.num_waiting_tokens) == (0, 0)


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_pause_and_resume(make_engine, tiny_llama, make_llm, mode):
    engine = make_engine()
    await engine.start()
    [expected] = tokens(make_llm(tiny_llama), [[4] * 9])
    running = [asyncio.create_task(collect(engine, [4] * 9)) for _ in range(4)]
    while engine.metrics.generation_tokens.value == 0:
        await asyncio.sleep(0.001)
    await engine.pause_generation(mode=mode)
    assert await engine.is_paused()
    late = asyncio.create_task(collect(engine, [4] * 9))
    await asyncio.sleep(0.1)
    assert [task.done() for task in (*running, late)] == [mode != "keep"] * 4 + [False]
    await engine.resume_generation()
    assert (await late).outputs[0].token_ids == expected
    for output in await asyncio.gather(*running):
        if output.outputs[0].finish_reason != "abort":
            assert output.outputs[0].token_ids == expected
        else:
            assert mode == "abort"


@pytest.mark.slow
async def test_sleeping_engine_queues(make_engine, tiny_llama, make_llm):
    engine = make_engine()
    await engine.sleep(2)
    assert await engine.is_sleeping()
    tasks = [asyncio.create_task(collect(engine, prompt)) for prompt in PROMPTS]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in tasks)
    await engine.wake_up()
    outputs = await asyncio.gather(*tasks)
    assert [output.outputs[0].token_ids for output in outputs] == tokens(make_llm(tiny_llama))


async def test_drain_and_shutdown(make_engine):
    engine = make_engine(shutdown_timeout=20.0)
    tasks = [asyncio.create_task(collect(engine, prompt)) for prompt in PROMPTS]
    await engine.start()
    await asyncio.sleep(0.05)
    ending = asyncio.ensure_future(engine.shutdown())
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="shutting down"):
        await collect(engine, [1])
    assert all(output.finished for output in await asyncio.gather(*tasks))
    await ending
    assert engine.errored
    assert engine.is_stopped
    assert not engine.is_running


async def test_drain_has_an_end(make_engine):
    engine = make_engine()
    await engine.wait_for_requests_to_drain(1)
    long = SamplingParams(max_tokens=400, ignore_eos=True, detokenize=False)
    await engine.add_request("a", [1], long)
    with pytest.raises(TimeoutError, match=r"Timeout reached after 0\.01 seconds"):
        await engine.wait_for_requests_to_drain(0.01)
    await engine.abort("a")
    await engine.wait_for_requests_to_drain(1)


async def test_strict_ids_and_refusals(make_engine):
    engine = make_engine(strict_request_ids=True)
    await engine.add_request("a", [1] * 9, GREEDY)
    with pytest.raises(ValueError, match="'a' is in use"):
        await engine.add_request("a", [1] * 9, GREEDY)
    for call in (
        engine.start_profile(),
        engine.collective_rpc(len),
    ):
        with pytest.raises(Unsupported):
            await call
    with pytest.raises(RequestError, match="only supported for pooling models"):
        await anext(engine.encode("a"))
    for call in engine.add_lora(None), engine.pin_lora(1):
        with pytest.raises(RequestError, match=r"takes a LoRARequest|LoRA 1 is not registered\."):
            await call
    assert await engine.list_loras() == set() and not await engine.remove_lora(1)
    assert await engine.get_supported_tasks() == ("generate",)
    assert len(await engine.collective_rpc("describe", timeout=20)) == 1
    assert [output.request_id for output in await engine.step()] == ["a"]
