"""One engine computes prompts, another goes on: the tokens are one engine's, whatever happens in between."""

import multiprocessing
import os
import random
import signal
import time

import pytest

from octavo import LLM, SamplingParams
from octavo.base.block_link import BlockClient
from octavo.base.errors import ConfigError, RequestError
from octavo.base.link import free_port
from octavo.engine.kvcache import shared
from octavo.engine.scheduler import plan
from tests.process_fakes import wait_until

KEY = "a key of more than sixteen characters"
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False)
SMALL = {"num_gpu_blocks_override": 64, "cpu_threads": 1}
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OCTAVO_NODE_KEY", KEY)
    monkeypatch.setattr(plan, "LONGEST_PART", 32)  # prompts are passed on in several


@pytest.fixture
def impatient(monkeypatch):
    """Who does not answer is given up soon."""
    monkeypatch.setattr(shared, "_PATIENCE_S", 0.5)


def transfer(role, port=None, policy="recompute"):
    return {
        "kv_connector": "TCPConnector",
        "kv_role": role,
        "kv_port": port or free_port("127.0.0.1"),
        "kv_load_failure_policy": policy,
    }


def prompts(count=3, length=70):
    generator = random.Random(5)
    return [[generator.randrange(128) for _ in range(length)] for _ in range(count)]


def ask(llm, prompt, params=PARAMS, **options):
    [output] = llm.generate([prompt], params, use_tqdm=False, **options)
    return output


def told(llm, prompt):
    """What the engine that computes the prompt tells the other one."""
    return ask(llm, prompt, ONE, kv_transfer_params={"do_remote_decode": True}).kv_transfer_params


@pytest.mark.matrix
@pytest.mark.parametrize(
    "sizes", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow)], ids=["one", "two ranks"]
)
def test_another_engine_goes_on(tiny_model, make_llm, sizes):
    work = prompts()
    plain = make_llm(tiny_model)
    expected = [ask(plain, prompt).outputs[0].token_ids for prompt in work]
    first = make_llm(tiny_model, kv_transfer_config=transfer("kv_producer"), **sizes)
    second = make_llm(tiny_model, kv_transfer_config=transfer("kv_consumer", policy="fail"), **sizes)
    for prompt, tokens in zip(work, expected, strict=True):
        params = told(first, prompt)
        assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
        assert (params["remote_host"], params["tp_size"]) == (
            "127.0.0.1",
            sizes.get("tensor_parallel_size", 1),
        )
        assert len(params["remote_block_ids"]) > 0 and params["remote_engine_id"]
        output = ask(second, prompt, kv_transfer_params=params)
        assert output.outputs[0].token_ids == tokens
        assert output.num_cached_tokens == 64, "all whole blocks came"
        assert output.kv_transfer_params is None
    named = SamplingParams(
        max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False,
        extra_args={"kv_transfer_params": told(first, work[0][::-1])},
    )  # fmt: skip
    assert ask(second, work[0][::-1], named).num_cached_tokens == 64, "vLLM's way offline"


def test_a_wrong_block_would_be_noticed(tiny_llama, make_llm, monkeypatch):
    """The same check with other contents fails: the tokens do come from what was sent."""
    work = prompts()
    first = make_llm(tiny_llama, kv_transfer_config=transfer("kv_producer"))
    second = make_llm(tiny_llama, kv_transfer_config=transfer("kv_consumer"))
    expected, params = ask(first, work[0]).outputs[0].token_ids, told(first, work[0])
    read = BlockClient.read
    monkeypatch.setattr(BlockClient, "read", lambda *given: [bytes(len(block)) for block in read(*given)])
    assert ask(second, work[0], kv_transfer_params=params).outputs[0].token_ids != expected


@pytest.mark.matrix
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_an_engine_that_is_gone(tiny_llama, make_llm, impatient, policy):
    [prompt, other, _] = prompts()
    plain = make_llm(tiny_llama)
    first = make_llm(tiny_llama, kv_transfer_config=transfer("kv_producer"))
    second = make_llm(tiny_llama, kv_transfer_config=transfer("kv_both", policy=policy))
    params = told(first, prompt)
    first.shutdown()
    output = ask(second, prompt, kv_transfer_params=params)
    if policy == "recompute":
        assert output.outputs[0].token_ids == ask(plain, prompt).outputs[0].token_ids
        assert output.num_cached_tokens == 0
    else:
        assert output.outputs[0].finish_reason == "error"
        assert "could not be loaded: tcp://127.0.0.1:" in output.outputs[0].error
    assert ask(second, other).outputs[0].token_ids == ask(plain, other).outputs[0].token_ids


@pytest.mark.matrix
@pytest.mark.parametrize(
    "sizes", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow)], ids=["one", "two ranks"]
)
def test_blocks_are_pushed(tiny_model, make_llm, sizes):
    """The engine that goes on needs nothing more of the first, which has ended before."""
    work, port = prompts(), free_port("127.0.0.1")
    plain = make_llm(tiny_model)
    first = make_llm(tiny_model, kv_transfer_config=transfer("kv_producer"), **sizes)
    second = make_llm(tiny_model, kv_transfer_config=transfer("kv_consumer", port, policy="fail"), **sizes)
    named = {"do_remote_decode": True, "remote_host": "127.0.0.1", "remote_port": port}
    params = [ask(first, prompt, ONE, kv_transfer_params=named).kv_transfer_params for prompt in work]
    assert ask(second, work[-1], kv_transfer_params=params[-1]).num_cached_tokens == 64, (
        "and they came in turn"
    )
    first.shutdown()
    for prompt, told in list(zip(work, params, strict=True))[:-1]:
        output = ask(second, prompt, kv_transfer_params=told)
        assert output.outputs[0].token_ids == ask(plain, prompt).outputs[0].token_ids
        assert output.num_cached_tokens == 64, "all whole blocks were there"


def test_blocks_are_pushed_while_the_rest_is_computed(tiny_llama, make_llm, monkeypatch):
    [prompt, *_], port, pushed, write = prompts(length=230), free_port("127.0.0.1"), [], BlockClient.write
    monkeypatch.setattr(BlockClient, "write", lambda *given: (write(*given), pushed.append(given[1])))
    plain, long = make_llm(tiny_llama), {"max_model_len": 256}
    first = make_llm(tiny_llama, kv_transfer_config=transfer("kv_producer"), **long)
    second = make_llm(tiny_llama, kv_transfer_config=transfer("kv_consumer", port, policy="fail"), **long)
    named = {"do_remote_decode": True, "remote_host": "127.0.0.1", "remote_port": port}
    params = ONE.clone()
    params.extra_args = {"kv_transfer_params": named}
    first.enqueue([prompt], params)
    first.llm_engine.step()
    assert wait_until(lambda: len(pushed) >= 2, 10) and len(pushed) < 230 // 16, "a part of it"
    [output] = first.wait_for_completion(use_tqdm=False)
    assert wait_until(lambda: len(pushed) >= 230 // 16, 10) and len(set(pushed)) == len(pushed), "each once"
    first.shutdown()
    output = ask(second, prompt, kv_transfer_params=output.kv_transfer_params)
    assert output.outputs[0].token_ids == ask(plain, prompt).outputs[0].token_ids
    assert output.num_cached_tokens == 224


def compute_and_die(folder, config, prompt, params, num_blocks):
    """Another process: after so many blocks were pushed it is killed."""
    write = BlockClient.write

    def write_some(client, *given):
        nonlocal num_blocks
        if not num_blocks:
            os.kill(os.getpid(), signal.SIGKILL)
        num_blocks -= 1
        write(client, *given)

    BlockClient.write = write_some
    llm = LLM(str(folder), dtype="float32", skip_tokenizer_init=True, kv_transfer_config=config, **SMALL)
    llm.generate([prompt], ONE, use_tqdm=False, kv_transfer_params=params)
    time.sleep(60)


@pytest.mark.parametrize("policy", ["recompute", pytest.param("fail", marks=pytest.mark.slow)])
def test_an_engine_that_is_killed_while_it_pushes(tiny_llama, make_llm, impatient, policy):
    [prompt, other, _], port = prompts(), free_port("127.0.0.1")
    plain, config = make_llm(tiny_llama), transfer("kv_producer")
    second = make_llm(tiny_llama, kv_transfer_config=transfer("kv_both", port, policy), **SMALL)
    named = {"do_remote_decode": True, "remote_host": "127.0.0.1", "remote_port": port}
    first = multiprocessing.get_context("spawn").Process(
        target=compute_and_die, args=(tiny_llama, config, prompt, named, 2)
    )
    first.start()
    first.join(120)
    assert first.exitcode == -signal.SIGKILL
    params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": config["kv_port"]}
    output, expected = ask(second, prompt, kv_transfer_params=params), ask(plain, prompt).outputs[0].token_ids
    if policy == "recompute":
        assert output.outputs[0].token_ids == expected
        assert output.num_cached_tokens == 32, "what had come is used"
    else:
        assert "could not be loaded: tcp://127.0.0.1:" in output.outputs[0].error
        assert ask(second, prompt).outputs[0].token_ids == expected, "without it, too"
    assert ask(second, other).outputs[0].token_ids == ask(plain, other).outputs[0].token_ids


def test_a_target_that_takes_nothing_disturbs_nobody(tiny_llama, make_llm, impatient):
    """Nobody listens there, or an engine that only serves."""
    work = prompts()
    plain, one = make_llm(tiny_llama), make_llm(tiny_llama, kv_transfer_config=transfer("kv_producer"))
    deaf = transfer("kv_producer")
    other = make_llm(tiny_llama, kv_transfer_config=deaf)
    for prompt, port in zip(work, (free_port("127.0.0.1"), deaf["kv_port"]), strict=False):
        named = {"do_remote_decode": True, "remote_host": "127.0.0.1", "remote_port": port}
        output = ask(one, prompt, kv_transfer_params=named)
        assert output.outputs[0].token_ids == ask(plain, prompt).outputs[0].token_ids
    assert ask(other, work[1]).num_cached_tokens == 0


def test_what_is_refused(tiny_llama, make_llm, monkeypatch):
    plain = make_llm(tiny_llama)
    with pytest.raises(RequestError, match="kv_transfer_params needs an engine with kv_transfer_config"):
        ask(plain, [1, 2], kv_transfer_params={"do_remote_decode": True})
    engine = make_llm(
        tiny_llama, kv_transfer_config=transfer("kv_both", port=(port := free_port("127.0.0.1")))
    )
    with pytest.raises(RequestError, match="needs remote_host and remote_port"):
        ask(engine, [1, 2], kv_transfer_params={"do_remote_prefill": True})
    with pytest.raises(RequestError, match="may name those of the one to push to, got 'here' and None"):
        ask(engine, [1, 2], kv_transfer_params={"do_remote_decode": True, "remote_host": "here"})
    with pytest.raises(ConfigError, match="cannot be listened at"):
        make_llm(tiny_llama, kv_transfer_config=transfer("kv_both", port=port))
    with pytest.raises(ConfigError, match="kv_load_failure_policy must be one of recompute, fail"):
        make_llm(tiny_llama, kv_transfer_config=transfer("kv_both", policy="hope"))
    monkeypatch.setenv("OCTAVO_NODE_KEY", "short")
    with pytest.raises(ConfigError, match="needs the variable OCTAVO_NODE_KEY"):
        make_llm(tiny_llama, kv_transfer_config=transfer("kv_both"))
