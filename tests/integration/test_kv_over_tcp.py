"""One engine computes prompts, another goes on: the tokens are one engine's, whatever happens in between."""

import random

import pytest

from octavo import SamplingParams
from octavo.base.errors import ConfigError, RequestError
from octavo.base.link import free_port

KEY = "a key of more than sixteen characters"
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False)
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OCTAVO_NODE_KEY", KEY)


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
    from octavo.base.block_link import BlockClient

    work = prompts()
    first = make_llm(tiny_llama, kv_transfer_config=transfer("kv_producer"))
    second = make_llm(tiny_llama, kv_transfer_config=transfer("kv_consumer"))
    expected, params = ask(first, work[0]).outputs[0].token_ids, told(first, work[0])
    read = BlockClient.read
    monkeypatch.setattr(BlockClient, "read", lambda *given: [bytes(len(block)) for block in read(*given)])
    assert ask(second, work[0], kv_transfer_params=params).outputs[0].token_ids != expected


@pytest.mark.matrix
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_an_engine_that_is_gone(tiny_llama, make_llm, policy):
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


def test_what_is_refused(tiny_llama, make_llm, monkeypatch):
    plain = make_llm(tiny_llama)
    with pytest.raises(RequestError, match="kv_transfer_params needs an engine with kv_transfer_config"):
        ask(plain, [1, 2], kv_transfer_params={"do_remote_decode": True})
    engine = make_llm(
        tiny_llama, kv_transfer_config=transfer("kv_both", port=(port := free_port("127.0.0.1")))
    )
    with pytest.raises(RequestError, match="needs remote_host and remote_port"):
        ask(engine, [1, 2], kv_transfer_params={"do_remote_prefill": True})
    with pytest.raises(ConfigError, match="cannot be listened at"):
        make_llm(tiny_llama, kv_transfer_config=transfer("kv_both", port=port))
    with pytest.raises(ConfigError, match="kv_load_failure_policy must be one of recompute, fail"):
        make_llm(tiny_llama, kv_transfer_config=transfer("kv_both", policy="hope"))
    monkeypatch.setenv("OCTAVO_NODE_KEY", "short")
    with pytest.raises(ConfigError, match="needs the variable OCTAVO_NODE_KEY"):
        make_llm(tiny_llama, kv_transfer_config=transfer("kv_both"))
