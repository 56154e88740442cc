"""Two ranks in two processes over gloo give one rank's tokens, through the whole engine.

Runs with --whole alone; tests/parity/test_tensor_parallel_models.py has ranks, stages and experts.
"""

import pytest

from octavo import SamplingParams
from tests.tiny_models import make_oracle, save, tiny_config

LIMITS = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.8}, {"temperature": 0}]


@pytest.mark.slow
def test_two_ranks_equal_one(tiny_model, make_llm):
    prompts = [[i + 1] * (3 + 7 * i) for i in range(5)]
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False, temperature=t, seed=3)
        for t in (0.0, 0.0, 0.7, 1.0, 0.0)
    ]
    one, two = (
        make_llm(tiny_model, tensor_parallel_size=size).generate(prompts, params, use_tqdm=False)
        for size in (1, 2)
    )
    assert [o.outputs[0].token_ids for o in one] == [o.outputs[0].token_ids for o in two]


@pytest.mark.slow
def test_limits_of_an_odd_vocabulary(tmp_path, make_llm):
    """Requests of all kinds in one batch; one rank chooses from all logits."""
    config = tiny_config("LlamaForCausalLM") | {"vocab_size": 49_153}
    folder = save(make_oracle(config), tmp_path)
    prompts = [[i + 1] * (3 + 7 * i) for i in range(len(LIMITS))]
    params = [
        SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "detokenize": False, "seed": 3, **limits})
        for limits in LIMITS
    ]
    one, two = (
        make_llm(folder, tensor_parallel_size=size).generate(prompts, params, use_tqdm=False)
        for size in (1, 2)
    )
    assert [o.outputs[0].token_ids for o in one] == [o.outputs[0].token_ids for o in two]
