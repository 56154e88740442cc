"""Experts are moved between ranks while requests run, and the tokens stay those of one rank."""

import re

import pytest

from octavo import SamplingParams
from octavo.base.errors import ConfigError
from tests.tiny_models import make_oracle, save, tiny_config

SIZES = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
REPLICAS = {"data_parallel_size": 2, "enable_expert_parallel": True}
BALANCED = {"enable_eplb": True}
BOTH = SIZES | BALANCED


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    config = tiny_config("Qwen3MoeForCausalLM")
    return save(make_oracle(config), tmp_path_factory.mktemp("experts")), config["num_experts"]


def tokens(llm):
    params = SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False, temperature=0)
    prompts = [[i + 1] * (3 + 7 * i) for i in range(5)]
    return [o.outputs[0].token_ids for _ in range(2) for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(("interval", "spare"), [(6, 2), pytest.param(4, 0, marks=pytest.mark.slow)])
def test_moved_experts_change_no_token(experts, make_llm, capfd, interval, spare):
    config = {"num_redundant_experts": spare, "step_interval": interval, "window_size": 4}
    config["log_balancedness"] = True
    one = tokens(make_llm(experts[0], cpu_threads=1))
    many = tokens(make_llm(experts[0], cpu_threads=1, **SIZES, **BALANCED, eplb_config=config))
    assert one == many
    told = re.findall(r"Experts: balance ([\d.]+), ([\d.]+) if they are moved", capfd.readouterr().err)
    assert any(float(new) > float(old) * 1.02 for old, new in told), "something was moved"


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
def test_between_replicas_too(experts, make_llm, capfd, tp_size):
    """Of one request the other replica only joins; long prompts go to the ranks of their experts alone."""
    config = {"num_redundant_experts": 4, "step_interval": 6, "window_size": 4, "log_balancedness": True}
    params = SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False, temperature=0)
    sizes = REPLICAS | BALANCED | {"tensor_parallel_size": tp_size, "eplb_config": config}
    found = []
    for options in ({}, sizes):
        llm = make_llm(experts[0], cpu_threads=1, max_model_len=256, **options)
        for lengths in ((3, 10, 17, 24, 31), (9,), (230,) * 6):
            prompts = [[i + 1] * length for i, length in enumerate(lengths)]
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
    assert found[:3] == found[3:]
    told = re.findall(r"Experts: balance ([\d.]+), ([\d.]+) if they are moved", capfd.readouterr().err)
    assert any(float(new) > float(old) * 1.02 for old, new in told), "something was moved"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (BALANCED, "enable_eplb requires enable_expert_parallel"),
        (BALANCED | {"tensor_parallel_size": 2}, "enable_eplb requires enable_expert_parallel"),
        (SIZES | {"eplb_config": {"num_redundant_experts": 2}}, "num_redundant_experts needs enable_eplb"),
        (
            BOTH | {"eplb_config": {"num_redundant_experts": 3}},
            "must be a multiple of tensor_par",
        ),
        (
            BOTH | {"eplb_config": {"step_interval": 0}},
            "step_interval must be a whole number from 1",
        ),
        (BOTH | {"eplb_config": {"interval": 1}}, "eplb_config has no interval"),
    ],
)
def test_what_cannot_be_is_refused(experts, make_llm, options, text):
    with pytest.raises(ConfigError, match=text):
        make_llm(experts[0], **options)


def test_models_without_experts_are_refused(tiny_llama, make_llm):
    with pytest.raises(ConfigError, match="the model has no experts"):
        make_llm(tiny_llama, **SIZES, **BALANCED)
