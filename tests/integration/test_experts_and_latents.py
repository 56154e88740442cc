"""Models with experts and latent attention in the engine: chunks, preemption, prefixes, infinite rows."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.runtime.worker.worker import Worker
from tests.tiny_models import make_oracle, make_prompts, oracle_greedy, save, tiny_config

pytestmark = pytest.mark.matrix(3)

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 4, "max_model_len": 160}
EXACT = {"activations": "float32", "kv_cache_dtype": "float32"}


@pytest.fixture(
    scope="module",
    params=[
        "Qwen2MoeForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "Llama4ForCausalLM",
        "Ministral3ForCausalLM",
    ],
)
def pair(request, tmp_path_factory):
    oracle = make_oracle(tiny_config(request.param))
    return oracle, save(oracle, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    "options",
    [{"num_gpu_blocks_override": 200}, {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 24}],
    ids=["plenty", "tight"],
)
def test_greedy_tokens(pair, options):
    """Twice, so that prefixes are found. 60 blocks hold less than two of the four requests at their ends."""
    oracle, folder = pair
    prompts = make_prompts(131)
    with LLM(str(folder), **OPTIONS, **EXACT, **options) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                made = list(output.outputs[0].token_ids)
                assert made == oracle_greedy(oracle, prompt, made)
        if "max_num_batched_tokens" in options:
            assert {m.name: m for m in llm.get_metrics()}["vllm:num_preemptions"].value > 0


def test_the_cache_keeps_one_vector_per_token(tmp_path, monkeypatch):
    """Of rope and latent components, on whatever the allocator gave."""
    seen = []
    allocate = Worker.allocate

    def counted(worker, plan):
        seen.append(plan)
        return allocate(worker, plan)

    monkeypatch.setattr(Worker, "allocate", counted)
    folder = save(make_oracle(tiny_config("DeepseekV3ForCausalLM")), tmp_path)
    with LLM(str(folder), **OPTIONS, kv_cache_dtype="bfloat16", num_gpu_blocks_override=50):
        (plan,) = seen
        assert plan.bytes_per_token == 3 * (40 + 8) * 2


def test_a_request_without_numbers_ends_alone(tmp_path):
    """One token's embedding is infinite: so are its scores of experts."""
    oracle = make_oracle(tiny_config("Qwen3MoeForCausalLM"))
    folder = save(oracle, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = torch.inf
    save_file(tensors, folder / "model.safetensors")
    prompts = [[1, 2, 3], [4, 7, 5], [9, 8]]
    with LLM(str(folder), **OPTIONS, **EXACT, num_gpu_blocks_override=200) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert outputs[1].outputs[0].finish_reason == "error"
    for index in (0, 2):
        made = list(outputs[index].outputs[0].token_ids)
        if 7 not in made:
            assert made == oracle_greedy(oracle, prompts[index], made)
