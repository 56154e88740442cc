"""Ranks and stages on CPUs replay recorded calls: the bits of steps that are computed call by call."""

import pytest

from octavo import SamplingParams
from tests.integration.test_invariance import prompts
from tests.integration.test_recorded_calls import scored
from tests.tiny_models import make_oracle, save, tiny_config

RECORDING = {"distributed_executor_backend": "tests.recording_ranks:RecordingExecutor", "cpu_threads": 1}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "deepseek": "DeepseekV3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "qwen2": "Qwen2ForCausalLM",
}
"""Norms behind sums, latent attention and experts, and biases behind sums."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: save(make_oracle(tiny_config(architecture)), root / name)
        for name, architecture in ARCHITECTURES.items()
    }


def run(llm):
    """Tokens with their logprobs, greedy tokens alone, and how often each rank replayed."""
    work, greedy = prompts(12, shared=20), SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    found = (
        scored(llm, work, 12),
        [o.outputs[0].token_ids for o in llm.generate(work, greedy, use_tqdm=False)],
    )
    return found, [report["replays"] for report in llm.collective_rpc("describe")]


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("llama", 2, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama", 1, 2),
                ("llama", 2, 2),
                ("gemma3", 2, 1),
                ("deepseek", 2, 1),
                ("deepseek", 2, 2),
                ("gpt2", 2, 1),
                ("qwen2", 2, 2),
            )
        ),
    ],
)
def test_recorded_equals_eager(folders, make_llm, name, tp, pp):
    """Rows that fill a recording up (of nine become twelve) change nothing, nor do few seats and chunks."""
    options = RECORDING | {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    options |= {"max_num_seqs": 10, "max_num_batched_tokens": 40}
    recorded, replays = run(make_llm(folders[name], **options))
    eager, none = run(make_llm(folders[name], **options, enforce_eager=True))
    assert recorded == eager
    assert min(replays) > 20 and none == [0] * tp * pp


@pytest.mark.slow
def test_ranks_without_memory_in_common_record_nothing(folders, make_llm):
    """Two ranks add up alike, by kernels or by torch."""
    options = RECORDING | {"tensor_parallel_size": 2}
    by_kernels, replays = run(make_llm(folders["llama"], **options))
    by_torch, none = run(make_llm(folders["llama"], **options, disable_custom_all_reduce=True))
    assert by_kernels == by_torch
    assert min(replays) > 20 and none == [0, 0]
