"""Many adapters on few slots under a random load: no error, nobody's text, no growth.

OCTAVO_LORA_SOAK=200 runs so many seconds over 1,000 adapters, and loads 10,000 times.

Runs with --whole alone; tests/parity/test_lora_features.py has the parts.
"""

import asyncio
import os
import random
import shutil
import statistics
import time

import psutil
import pytest

from octavo import AsyncLLM, EngineArgs, SamplingParams
from octavo.base.errors import RequestError
from octavo.lora.request import LoRARequest
from tests import handmade_adapters
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

SECONDS = float(os.environ.get("OCTAVO_LORA_SOAK", "6"))
NUM_LOADS = 10_000 if SECONDS >= 60 else 300
NUM_ADAPTERS, NUM_SLOTS, NUM_SHAPES = (1000 if SECONDS >= 60 else 60), 8, 12
MOST_GROWTH = 80 << 20


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base, and adapters, of which only NUM_SHAPES differ in more than their digests."""
    root = tmp_path_factory.mktemp("soak")
    oracle = make_oracle(tiny_config("LlamaForCausalLM"))
    loras = []
    for number in range(NUM_ADAPTERS):
        folder = root / str(number)
        if number < NUM_SHAPES:
            handmade_adapters.write(oracle, folder, 1 + number, seed=number)
        else:
            shutil.copytree(root / str(number % NUM_SHAPES), folder)
            with (folder / "adapter_config.json").open("a") as file:
                file.write(" " * (number // NUM_SHAPES))  # another digest
        loras.append(LoRARequest(f"a{number}", number + 1, str(folder)))
    return save(oracle, root / "base"), loras


def start(folder) -> AsyncLLM:
    args = EngineArgs(
        model=str(folder), enable_lora=True, max_loras=NUM_SLOTS, max_cpu_loras=24, max_model_len=128, seed=0,
        num_gpu_blocks_override=200, max_num_seqs=16, skip_tokenizer_init=True, dtype="float32",
        activations="float32", kv_cache_dtype="float32",
    )  # fmt: skip
    return AsyncLLM.from_engine_args(args)


@pytest.mark.slow
async def test_many_adapters_on_few_slots(made):
    folder, loras = made
    engine = start(folder)
    (prompt,) = make_prompts(131, (20,))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    rng, waits, faults = random.Random(1), [], []

    async def answer(lora, request_id):
        began, first, last = time.monotonic(), 0.0, None
        async for output in engine.generate(prompt, params, request_id, lora_request=lora):
            first, last = first or time.monotonic() - began, output.outputs[0]
        return last, first

    try:
        expected = [
            (await answer(lora, f"first-{i}"))[0].token_ids for i, lora in enumerate(loras[:NUM_SHAPES])
        ]
        assert len(set(map(tuple, expected))) > NUM_SHAPES // 2
        process = psutil.Process()
        parts = [process, *process.children(recursive=True)]
        before, until, number = None, time.monotonic() + SECONDS, 0

        async def client(name):
            nonlocal number
            while time.monotonic() < until:
                number += 1
                chosen = rng.randrange(NUM_ADAPTERS)
                completion, first = await answer(loras[chosen], f"{name}-{number}")
                waits.append(first)
                if (
                    completion.finish_reason != "length"
                    or completion.token_ids != expected[chosen % NUM_SHAPES]
                ):
                    faults.append((chosen, completion))

        clients = [asyncio.create_task(client(name)) for name in range(24)]
        await asyncio.sleep(SECONDS / 2)
        before = sum(part.memory_info().rss for part in parts)
        await asyncio.gather(*clients)
        after = sum(part.memory_info().rss for part in parts)
        (counts,) = await engine.collective_rpc("adapter_counts")
    finally:
        await engine.shutdown()
    assert not faults, faults[:3]
    assert len(waits) >= 24 and counts["evictions"] > 0
    assert after - before < MOST_GROWTH, f"{(after - before) >> 20} MiB"


@pytest.mark.slow
async def test_loading_in_a_loop(made):
    """Adapters come and go, sound and broken ones; a request that is running says what it always says."""
    folder, loras = made
    engine = start(folder)
    (prompt,) = make_prompts(131, (20,))
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    broken = LoRARequest("broken", 5000, str(folder))
    process, sizes, answers = psutil.Process(), [], []

    async def answer(request_id):
        async for output in engine.generate(prompt, params, request_id, lora_request=loras[0]):
            last = output.outputs[0].token_ids
        answers.append(last)

    try:
        await answer("first")
        for number in range(NUM_LOADS):
            if number % 50 == 0:
                running = asyncio.create_task(answer(str(number)))
            lora = loras[1 + number % (NUM_ADAPTERS - 1)]
            assert await engine.add_lora(lora) and await engine.remove_lora(lora.lora_int_id)
            with pytest.raises(RequestError, match="No adapter found"):
                await engine.add_lora(broken)
            if number % 50 == 49:
                await running
                sizes.append(sum(p.memory_info().rss for p in (process, *process.children(recursive=True))))
        (counts,) = await engine.collective_rpc("adapter_counts")
        assert await engine.list_loras() == set()
    finally:
        await engine.shutdown()
    assert counts["loads"] == NUM_LOADS + 1 and answers == answers[:1] * len(answers)
    assert sizes[-1] - sizes[len(sizes) // 2] < MOST_GROWTH


@pytest.mark.slow
async def test_first_tokens_of_twice_as_many_adapters_as_slots(made):
    """The median wait is at most twice that of as many adapters as there are slots; runs in turn."""
    folder, loras = made
    engine = start(folder)
    (prompt,) = make_prompts(131, (20,))
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    rng, waits = random.Random(2), {NUM_SLOTS: [], 2 * NUM_SLOTS: []}

    async def client(name, count):
        for number in range(12):
            began, lora = time.monotonic(), loras[rng.randrange(count)]
            answer = engine.generate(prompt, params, f"{name}-{number}", lora_request=lora)
            await anext(answer)
            waits[count].append(time.monotonic() - began)
            async for _ in answer:
                pass

    try:
        for lora in loras[: 2 * NUM_SLOTS]:
            await engine.add_lora(lora)
        for turn in range(3):
            for count in waits:
                await asyncio.gather(*(client(f"{turn}-{count}-{i}", count) for i in range(NUM_SLOTS)))
    finally:
        await engine.shutdown()
    few, many = (statistics.median(waits[count]) for count in waits)
    assert many <= 2 * few, (few, many)
