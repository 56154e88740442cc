"""Ranks that divide the tokens of the cache give the tokens of one rank that has them all.

Most cases run with --whole alone; tests/kernels/test_shared_keys.py has the kernels.
"""

import pytest

from octavo import SamplingParams
from octavo.base.errors import ConfigError
from tests.tiny_models import make_oracle, save, tiny_config

SIZES = {"num_attention_heads": 8, "hidden_size": 64, "head_dim": 8, "num_hidden_layers": 3}
OPTIONS = {"max_num_batched_tokens": 32, "max_num_seqs": 6, "cpu_threads": 1, "block_size": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By kind: of one and of two key heads, with sinks, with latent attention."""
    folder = tmp_path_factory.mktemp("models")
    llama = tiny_config("LlamaForCausalLM") | SIZES
    configs = {
        "one": llama | {"num_key_value_heads": 1},
        "two": llama | {"num_key_value_heads": 2},
        "latent": tiny_config("DeepseekV2ForCausalLM"),
        "states": tiny_config("Qwen3NextForCausalLM") | {"num_key_value_heads": 1},
    }
    return {kind: save(make_oracle(config), folder / kind) for kind, config in configs.items()}


def answers(llm, num_times=2):
    """Greedy tokens of prompts in chunks, of which some have beginnings in common; again from the cache."""
    prompts = [[i + 1] * (3 + 17 * i) for i in range(6)] + [[5] * 70 + [i] for i in range(3)]
    params = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, temperature=0)
    found = []
    for _ in range(num_times):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
    return found


def divided(tp, dcp, **others):
    return {"tensor_parallel_size": tp, "decode_context_parallel_size": dcp} | OPTIONS | others


@pytest.mark.parametrize(
    ("kind", "tp", "dcp", "options"),
    [
        ("one", 2, 2, {}),
        pytest.param("one", 4, 2, {"cp_kv_cache_interleave_size": 8}, marks=pytest.mark.slow),
        pytest.param("one", 4, 4, {"cp_kv_cache_interleave_size": 2}, marks=pytest.mark.slow),
        pytest.param("two", 4, 2, {"steps_in_flight": 1}, marks=pytest.mark.slow),
        pytest.param("one", 2, 2, {"num_gpu_blocks_override": 14}, id="preempted", marks=pytest.mark.slow),
        pytest.param("one", 2, 2, {"pipeline_parallel_size": 2}, id="stages", marks=pytest.mark.slow),
        pytest.param(
            "one", 2, 2, {"spec_method": "ngram", "spec_tokens": 3}, id="drafts", marks=pytest.mark.slow
        ),
        pytest.param("latent", 2, 2, {}, marks=pytest.mark.slow),
        pytest.param("latent", 4, 4, {"cp_kv_cache_interleave_size": 4}, marks=pytest.mark.slow),
        pytest.param("states", 2, 2, {}, marks=pytest.mark.slow),
    ],
)
def test_ranks_equal_one(models, make_llm, kind, tp, dcp, options):
    one = answers(make_llm(models[kind], **OPTIONS))
    many = make_llm(models[kind], **divided(tp, dcp, **options))
    assert answers(many) == one
    assert answers(many) == one, "all prompts are in the cache"


def test_sizes_that_cannot_work_are_refused(models, make_llm):
    for kind, options, error, text in (
        ("one", divided(2, 3), ConfigError, "tp_size=2 must be divisible by dcp_size=3."),
        ("one", divided(2, 0), ConfigError, "Invalid decode_context parallel size: 0"),
        (
            "one",
            divided(2, 2, cp_kv_cache_interleave_size=3),
            ConfigError,
            r"Block_size\(8\) should be greater than or equal to and divisible by cp_kv_cache_",
        ),
        ("two", divided(2, 2), ConfigError, "2 must be greater than total num kv heads 2"),
        ("two", divided(4, 4), ConfigError, r"\(tensor parallel size 4 // total num kv heads 2\) = 2"),
    ):
        with pytest.raises(error, match=text):
            make_llm(models[kind], **options)
