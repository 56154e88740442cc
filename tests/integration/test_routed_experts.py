"""Which experts took each token: equal to those that transformers' routers choose, whatever steps did."""

import base64
import io

import httpx
import numpy as np
import pytest
import torch

from octavo import LLM, AsyncLLM, EngineArgs, SamplingParams
from octavo.base.errors import ConfigError, RequestError, Unsupported
from octavo.config.server import ServerConfig
from octavo.runtime.worker.routed_experts import RoutedExpertsPart
from octavo.serving.app import make_app
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

pytestmark = pytest.mark.matrix(3)

GREEDY = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, "detokenize": False}
OPTIONS = {
    "dtype": "float32",
    "activations": "float32",
    "kv_cache_dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "mamba_block_size": 16,
    "max_model_len": 160,
    "enable_return_routed_experts": True,
}
EXPERTS = ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"]


@pytest.fixture(scope="module", params=EXPERTS)
def pair(request, tmp_path_factory):
    oracle = make_oracle(tiny_config(request.param))
    return oracle, save(oracle, tmp_path_factory.mktemp(request.param))


@torch.inference_mode()
def expected(oracle, ids):
    """By layer: what its router chooses for each token; zeros where there is none."""
    layers = oracle.model.layers
    found = np.zeros((len(ids), len(layers), 3), np.uint8)
    hooks = []
    for number, layer in enumerate(layers):
        if not hasattr(layer.mlp, "experts"):
            continue

        def note(module, args, number=number):
            found[:, number] = args[1].reshape(len(ids), -1).numpy()

        hooks.append(layer.mlp.experts.register_forward_pre_hook(note))
    oracle(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return found


def check(oracle, prompt, completion, start=0):
    ids = [*prompt, *completion.token_ids][:-1]
    told, wanted = completion.routed_experts, expected(oracle, ids)[start:]
    assert told.shape == wanted.shape and told.dtype == np.uint8
    assert np.array_equal(np.sort(told, -1), np.sort(wanted, -1))


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 400},
        {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 24},
        {"num_gpu_blocks_override": 60, "swap_space": 0.01, "max_num_batched_tokens": 24},
        {"num_gpu_blocks_override": 400, "enforce_eager": True, "steps_in_flight": 2},
    ],
    ids=["plenty", "tight", "swapped", "in_flight"],
)
def test_ids_are_the_oracles(pair, options):
    """Twice, so that prefixes are found; 60 blocks hold less than two of the requests at their ends."""
    oracle, folder = pair
    prompts = make_prompts(131)
    with LLM(str(folder), **OPTIONS, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                check(oracle, prompt, output.outputs[0])
        assert {m.name: m for m in llm.get_metrics()}["vllm:prefix_cache_hits"].value > 0


def test_children_and_starts(pair):
    """Sequences of one prompt share its blocks; a start leaves out what is known."""
    oracle, folder = pair
    prompt = make_prompts(131, (40,))[0]
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=9, routed_experts_prompt_start=11)
    with LLM(str(folder), **OPTIONS, num_gpu_blocks_override=400) as llm:
        [output] = llm.generate([prompt], params, use_tqdm=False)
        for completion in output.outputs:
            check(oracle, prompt, completion, 11)
        with pytest.raises(RequestError, match="must be between 0 and 40, got 41"):
            llm.generate([prompt], SamplingParams(routed_experts_prompt_start=41), use_tqdm=False)


def test_copies_of_blocks_count(tmp_path, monkeypatch):
    """Without them, what comes back from host memory has the ids of others."""
    oracle = make_oracle(tiny_config("Qwen3MoeForCausalLM"))
    folder = save(oracle, tmp_path)
    monkeypatch.setattr(RoutedExpertsPart, "note_copies", lambda part, copies: None)
    tight = {"num_gpu_blocks_override": 60, "swap_space": 0.01, "max_num_batched_tokens": 24}
    prompts = make_prompts(131)
    with LLM(str(folder), **OPTIONS, **tight) as llm, pytest.raises(AssertionError):
        for _ in range(2):
            outputs = llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                check(oracle, prompt, output.outputs[0])


def test_what_is_refused(tmp_path):
    dense = save(make_oracle(tiny_config("LlamaForCausalLM")), tmp_path / "dense")
    with pytest.raises(ConfigError, match="this model has no experts"):
        LLM(str(dense), **OPTIONS)
    windows = save(make_oracle(tiny_config("MixtralForCausalLM")), tmp_path / "windows")
    with pytest.raises(Unsupported, match="a layer that sees the whole context"):
        LLM(str(windows), **OPTIONS)
    for options in ({"pipeline_parallel_size": 2}, {"spec_method": "ngram"}):
        with pytest.raises(Unsupported, match="in one stage only, without speculation"):
            LLM(str(windows), **OPTIONS, **options)


@pytest.mark.matrix
async def test_ids_over_http(pair):
    """In base64, as vLLM writes them; streams tell them at the end."""
    oracle, folder = pair
    prompt = make_prompts(131, (40,))[0]
    engine = AsyncLLM.from_engine_args(EngineArgs(model=str(folder), **OPTIONS, num_gpu_blocks_override=400))
    await engine.start()
    transport = httpx.ASGITransport(make_app(engine, ServerConfig()), raise_app_exceptions=False)
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            answer = await client.post("/v1/completions", json=body | {"routed_experts_prompt_start": 3})
    finally:
        await engine.shutdown()
    [choice] = answer.json()["choices"]
    told = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    wanted = expected(oracle, [*prompt, *choice["token_ids"]][:-1])[3:]
    assert np.array_equal(np.sort(told, -1), np.sort(wanted, -1))
