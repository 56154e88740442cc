"""Replicas that share experts give the tokens of one device, in any company, and come back together."""

import asyncio
import os
import signal

import psutil
import pytest

from octavo import AsyncLLM, EngineArgs, SamplingParams
from octavo.base.errors import ConfigError, Unsupported
from octavo.config.resolve import resolve
from tests.tiny_models import make_oracle, save, tiny_config

SHARED = {"data_parallel_size": 2, "enable_expert_parallel": True}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return save(make_oracle(tiny_config("Qwen3MoeForCausalLM")), tmp_path_factory.mktemp("experts"))


def tokens(llm, count, length=1):
    params = SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False, temperature=0)
    prompts = [[i + 1] * (3 + 7 * i * length) for i in range(count)]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_replicas_equal_one(experts, make_llm, tp_size):
    """Of one request the other replica computes nothing but its experts' part."""
    sizes = SHARED | {"tensor_parallel_size": tp_size}
    one, two = (make_llm(experts, cpu_threads=1, **options) for options in ({}, sizes))
    found = [[tokens(llm, count) for count in (5, 1, 5)] for llm in (one, two)]
    assert found[0] == found[1]
    two.sleep()
    two.wake_up()
    assert tokens(two, 3, length=5) == tokens(one, 3, length=5)


def ranks(engine):
    """The process of the only rank of each replica."""
    cores = [psutil.Process(door._core.pid) for door in engine.core.client.doors]
    return [
        child for core in cores for child in core.children() if "worker.main" in " ".join(child.cmdline())
    ]


@pytest.mark.slow
async def test_all_replicas_come_back_when_a_rank_dies(experts, make_llm):
    """Requests of both go on, at the same token."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, detokenize=False, temperature=0)
    prompts = [{"prompt_token_ids": [i + 1] * 9} for i in range(4)]
    options = {"dtype": "float32", "cpu_threads": 1, "max_model_len": 128, "num_gpu_blocks_override": 200}
    args = EngineArgs(model=str(experts), skip_tokenizer_init=True, **options, **SHARED)
    one = make_llm(experts, cpu_threads=1, max_model_len=128)
    expected = [output.outputs[0].token_ids for output in one.generate(prompts, params, use_tqdm=False)]
    engine = AsyncLLM(resolve(args), on_crash="replay")
    try:
        await engine.start()

        async def ask(prompt):
            return [output async for output in engine.generate(prompt, params)][-1].outputs[0].token_ids

        assert await ask(prompts[0]) == expected[0]
        before = ranks(engine)
        assert len(before) == 2
        asked = [asyncio.create_task(ask(prompt)) for prompt in prompts]
        await asyncio.sleep(0.1)
        os.kill(before[1].pid, signal.SIGKILL)
        assert await asyncio.wait_for(asyncio.gather(*asked), 100) == expected
        assert {process.pid for process in ranks(engine)}.isdisjoint(process.pid for process in before)
        assert await ask(prompts[1]) == expected[1]
    finally:
        await engine.shutdown()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"pipeline_parallel_size": 2}, Unsupported, "does not work with pipeline_parallel_size"),
        ({"data_parallel_rank": 0}, Unsupported, "does not work with data_parallel_rank"),
        ({"data_parallel_size": 3}, ConfigError, "does not divide the model's"),
    ],
)
def test_what_cannot_be_is_refused(experts, make_llm, options, error, text):
    with pytest.raises(error, match=text):
        make_llm(experts, **SHARED | options)


def test_a_dense_model_shares_nothing(tiny_llama, make_llm, caplog):
    assert len(tokens(make_llm(tiny_llama, cpu_threads=1, **SHARED), 2)) == 2
    assert "enable_expert_parallel has no effect" in caplog.text
