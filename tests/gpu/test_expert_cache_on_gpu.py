"""Experts in host memory on a GPU: the same tokens, read over the bus, copied and moved; after sleep, too."""

import pytest

from octavo import LLM, SamplingParams
from octavo.runtime.loader import expert_cache
from tests.tiny_models import make_oracle, make_prompts, oracle_greedy, save, tiny_config

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
OPTIONS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "num_gpu_blocks_override": 400,
}
ONE_EXPERT = 3 * 32 * 48 * 4 * 3 / 2**30  # in each of three layers


@pytest.mark.parametrize(
    "options",
    [
        {"cpu_offload_experts": -1, "expert_cache_gb": 3.01 * ONE_EXPERT},
        {"cpu_offload_experts": -1, "expert_cache_gb": 0.0, "enforce_eager": True},
        {"cpu_offload_experts": 2, "max_num_batched_tokens": 24},
    ],
    ids=["some", "one_eager", "two_layers"],
)
def test_no_token_changes(tmp_path, options, monkeypatch):
    monkeypatch.setattr(expert_cache, "_INTERVAL", 3)
    oracle = make_oracle(tiny_config("Qwen3MoeForCausalLM"))
    folder, prompts = save(oracle, tmp_path), make_prompts(131)
    with LLM(str(folder), device="cuda", **OPTIONS, **options) as llm:
        [report] = llm.collective_rpc("describe")
        assert 0 < report["host_weight_bytes"] < report["weight_bytes"]
        for level in (1, 2, 0):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                made = list(output.outputs[0].token_ids)
                assert made == oracle_greedy(oracle, prompt, made)
            if level:
                llm.sleep(level)
                llm.wake_up()
