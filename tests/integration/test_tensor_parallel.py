"""Two ranks in two processes over gloo give one rank's tokens, through the whole engine.

Runs with --whole alone; tests/parity/test_tensor_parallel_models.py has ranks, stages and experts.
"""

import pytest

from octavo import SamplingParams


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
