"""Models with states on a GPU, in the engine: captured steps, chunks, preemption, found prefixes."""

import pytest

from octavo import LLM, SamplingParams
from tests.tiny_models import RECURRENT, make_oracle, make_prompts, oracle_greedy, save, tiny_config

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 160, "mamba_block_size": 16}


@pytest.fixture(scope="module", params=RECURRENT)
def pair(request, tmp_path_factory):
    oracle = make_oracle(tiny_config(request.param))
    return oracle, save(oracle, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 24}])
def test_greedy_tokens(pair, options):
    """Twice, so that prefixes are found."""
    oracle, folder = pair
    prompts = make_prompts(131, (1, 7, 40, 90, 64))
    with LLM(str(folder), device="cuda", num_gpu_blocks_override=400, **OPTIONS, **options) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                made = list(output.outputs[0].token_ids)
                assert made == oracle_greedy(oracle, prompt, made)
