"""Promises of docs/compatibility.md that no other test checks."""

import json
import logging
import os
import subprocess
import sys

import pytest

from octavo import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineArgs,
    EngineDead,
    ModelRegistry,
    SamplingParams,
    Unsupported,
)
from octavo.base import env
from octavo.runtime.models.interface import MODELS
from octavo.runtime.models.llama import Llama
from tests.tiny_models import make_oracle, make_prompts, oracle_greedy, save, tiny_config

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
LOCATE = "from octavo.base.hub import locate; print(locate('org/name'))"


@pytest.fixture
async def make_engine(tiny_llama):
    opened = []

    def make(**options):
        fixed = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 200}
        opened.append(AsyncLLM.from_engine_args(EngineArgs(model=str(tiny_llama), **(fixed | options))))
        return opened[-1]

    yield make
    for engine in opened:
        await engine.shutdown()


async def collect(engine, prompt):
    return [output async for output in engine.generate(prompt, GREEDY)][-1]


async def test_caches_of_the_asynchronous_engine(make_engine):
    engine = make_engine()
    prompt = [3] * 40
    cached = []
    for verb in (engine.do_log_stats, engine.reset_prefix_cache, engine.reset_mm_cache):
        cached.append((await collect(engine, prompt)).num_cached_tokens)
        await verb()
    assert cached == [0, 32, 0]
    assert await engine.reset_encoder_cache() is None
    assert await engine.get_tokenizer() is None


def test_what_a_request_leaves_in_the_cache(tiny_llama, make_llm):
    def created(llm, length):
        [output] = llm.generate([[3] * length], GREEDY, use_tqdm=False)
        return output.num_cache_creation_tokens

    llm = make_llm(tiny_llama)
    assert [created(llm, length) for length in (40, 40, 60)] == [32, 0, 16]
    assert created(make_llm(tiny_llama, enable_prefix_caching=False), 40) == 0


def test_a_registered_architecture(tmp_path, monkeypatch):
    oracle = make_oracle(tiny_config("LlamaForCausalLM"))
    path = save(oracle, tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["MineForCausalLM"]}))
    monkeypatch.setattr(MODELS, "_targets", dict(MODELS._targets))
    ModelRegistry.register_model("MineForCausalLM", Llama)
    assert "MineForCausalLM" in ModelRegistry.get_supported_archs()
    llm = LLM(str(path), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=50)
    [output] = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == oracle_greedy(oracle, [1, 2, 3], output.outputs[0].token_ids)


@pytest.mark.slow
async def test_a_profile_of_the_asynchronous_engine(make_engine, tmp_path):
    engine = make_engine(profiler_dir=str(tmp_path))
    await engine.start_profile("mine")
    await collect(engine, [1, 2, 3])
    [path] = await engine.stop_profile()
    assert json.loads((tmp_path / path).read_text())["traceEvents"]


async def test_a_dead_engine_keeps_its_error(make_engine):
    engine = make_engine()
    assert engine.dead_error is None
    assert (await collect(engine, [1])).finished
    await engine.shutdown()
    with pytest.raises(EngineDead) as raised:
        await engine.check_health()
    assert str(engine.dead_error) == str(raised.value)


def test_requests_in_the_log_and_the_served_name(tiny_llama, make_llm, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    caplog.set_level(logging.INFO, logger="octavo")
    llm = make_llm(tiny_llama, enable_log_requests=True, served_model_name="mine")
    llm.generate([[7] * 5], GREEDY, use_tqdm=False)
    lines = [message for message in caplog.messages if message.startswith("Request ")]
    assert lines[0].endswith(": 5 prompt tokens")
    assert "length" in lines[1]
    assert {metric.labels["model_name"] for metric in llm.get_metrics()} == {"mine"}


@pytest.mark.parametrize("name", ["OCTAVO_LOGGING_LEVEL", "VLLM_LOGGING_LEVEL", "VLLM_LOG_LEVEL"])
def test_every_name_of_the_log_level(monkeypatch, name):
    for other in ("OCTAVO_LOGGING_LEVEL", "VLLM_LOGGING_LEVEL", "VLLM_LOG_LEVEL"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "debug")
    assert env.log_level() == "DEBUG"


def test_the_hub_cache_is_where_hf_home_says(tmp_path):
    commit = "0" * 40
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    variables = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    kept = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_CACHE", "HF_HOME")}
    command = [sys.executable, "-c", LOCATE]
    found = subprocess.run(command, env=kept | variables, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(snapshot)


def test_mixtral(tmp_path):
    oracle = make_oracle(
        {
            "model_type": "mixtral",
            "vocab_size": 131,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "pad_token_id": 0,
        }
    )
    options = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 60}
    prompts = make_prompts(131)
    with LLM(str(save(oracle, tmp_path)), **options) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            tokens = list(output.outputs[0].token_ids)
            assert tokens == oracle_greedy(oracle, prompt, tokens)


def test_unknown_quantizations_are_refused(tiny_llama):
    plain = "The weights are not quantized, which does not fit {}. Use int8"
    for name, says in (("magic", "magic"), *((name, plain.format(name)) for name in ("awq", "online"))):
        with pytest.raises((ConfigError, Unsupported), match=says):
            LLM(str(tiny_llama), quantization=name, skip_tokenizer_init=True)


def test_the_longest_request_that_fits(tiny_model, make_llm):
    """The workers' tables are made for it: it runs to its very end, as in an engine with room."""
    llm = make_llm(tiny_model, max_model_len="auto", num_gpu_blocks_override=14, block_size=4)
    longest = llm.model_config.max_model_len
    assert 10 < longest < 100
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False)
    [output] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == longest - 3
    [whole] = make_llm(tiny_model, max_model_len=longest).generate([[5, 6, 7]], params, use_tqdm=False)
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids
