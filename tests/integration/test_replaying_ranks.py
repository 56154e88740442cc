"""Ranks and stages replay captured steps: the tokens of eager ones, and all of them replay the same."""

import pytest

from octavo import SamplingParams
from tests.integration.test_invariance import params, prompts

REPLAYING = "tests.replaying_ranks:ReplayingExecutor"
OPTIONS = {"max_num_batched_tokens": 70, "max_num_seqs": 8, "cpu_threads": 1}


@pytest.mark.parametrize(
    ("tp", "pp"),
    [(2, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 2), (2, 2), (1, 3)))],
)
def test_replayed_equals_eager(tiny_llama, make_llm, tp, pp):
    """Some steps are not replayed, by all ranks or by the last stage alone (prompt logprobs): they mix."""
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    work, wanted = prompts(12), params(12)
    wanted[3] = SamplingParams(max_tokens=9, temperature=0, prompt_logprobs=1, logprobs=2, detokenize=False)
    answers, replays = [], []
    for executor, eager in ((REPLAYING, False), ("mp", True)):
        llm = make_llm(
            tiny_llama, distributed_executor_backend=executor, enforce_eager=eager, **OPTIONS, **sizes
        )
        outputs = llm.generate(work, wanted, use_tqdm=False)
        answers.append([(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs])
        replays.append([report.get("replays") for report in llm.collective_rpc("describe")])
    assert answers[0] == answers[1]
    assert min(replays[0]) > 20 and replays[1] == [None] * tp * pp
    assert len(set(replays[0][-tp:])) == 1, "ranks of one stage replayed different steps"
