"""Which experts took each token, on a GPU: captured steps order their rows anew, and tell the same."""

import pytest

from octavo import LLM, SamplingParams
from tests.integration.test_routed_experts import GREEDY, OPTIONS, check
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 24}])
def test_ids_are_the_oracles(tmp_path, options):
    oracle = make_oracle(tiny_config("Qwen3MoeForCausalLM"))
    folder, prompts = save(oracle, tmp_path), make_prompts(131, (7, 90, 1, 40))
    told = {name: value for name, value in OPTIONS.items() if name != "activations"}
    with LLM(str(folder), **told | options, device="cuda", num_gpu_blocks_override=400) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                check(oracle, prompt, output.outputs[0])
