"""Ranks that divide the tokens of the cache give the tokens of one rank that has them all.

They run with --whole alone; tests/kernels/test_shared_keys.py has the kernels.
"""

import pytest

from octavo import SamplingParams
from octavo.base.errors import ConfigError, Unsupported
from tests.tiny_models import make_oracle, save, tiny_config

SIZES = {"num_attention_heads": 8, "hidden_size": 64, "head_dim": 8, "num_hidden_layers": 3}
SLOW = pytest.mark.slow
OPTIONS = {"max_num_batched_tokens": 32, "max_num_seqs": 6, "cpu_threads": 1, "block_size": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By kind: of one and of two key heads, with latent attention, with layers that keep states."""
    folder = tmp_path_factory.mktemp("models")
    llama = tiny_config("LlamaForCausalLM") | SIZES
    configs = {
        "one": llama | {"num_key_value_heads": 1},
        "two": llama | {"num_key_value_heads": 2},
        "latent": tiny_config("DeepseekV2ForCausalLM"),
        "states": tiny_config("Qwen3NextForCausalLM") | {"num_key_value_heads": 1},
        "window": tiny_config("Gemma3ForCausalLM") | {"num_key_value_heads": 1},
        "windows": tiny_config("Gemma3ForCausalLM")
        | {"num_key_value_heads": 1, "layer_types": ["sliding_attention"] * 6},
    }
    return {kind: save(make_oracle(config), folder / kind) for kind, config in configs.items()}


def answers(llm, num_times=2):
    """Tokens of prompts in chunks; some begin alike, one has two answers. Again from the cache."""
    prompts = [[i + 1] * (3 + 17 * i) for i in range(6)] + [[5] * 70 + [i] for i in range(3)]
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, temperature=t, n=1 + (t > 0), seed=7)
        for t in (0.0, 0.0, 0.0, 0.6, 0.0, 0.0, 0.0, 0.0, 0.0)
    ]
    found = []
    for _ in range(num_times):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([[answer.token_ids for answer in output.outputs] for output in outputs])
    return found


def divided(tp, dcp, **others):
    return {"tensor_parallel_size": tp, "decode_context_parallel_size": dcp} | OPTIONS | others


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tp", "dcp", "options"),
    [
        ("one", 2, 2, {}),
        pytest.param("one", 4, 2, {"cp_kv_cache_interleave_size": 8}),
        pytest.param("one", 4, 4, {"cp_kv_cache_interleave_size": 2}),
        pytest.param("two", 4, 2, {"steps_in_flight": 1}),
        pytest.param("one", 2, 2, {"num_gpu_blocks_override": 14}, id="preempted"),
        pytest.param("one", 2, 2, {"pipeline_parallel_size": 2}, id="stages"),
        pytest.param("one", 2, 2, {"spec_method": "ngram", "spec_tokens": 3}, id="drafts"),
        pytest.param("latent", 2, 2, {}),
        pytest.param("latent", 4, 4, {"cp_kv_cache_interleave_size": 4}),
        ("states", 2, 2, {}),
        ("window", 2, 2, {}),
        pytest.param("window", 4, 4, {"cp_kv_cache_interleave_size": 2, "swap_space": 0.001}, id="swapped"),
    ],
)
def test_ranks_equal_one(models, make_llm, kind, tp, dcp, options):
    one = answers(make_llm(models[kind], **OPTIONS))
    many = make_llm(models[kind], **divided(tp, dcp, **options))
    assert answers(many) == one
    many.sleep()
    many.wake_up()
    assert answers(many) == one


@pytest.mark.parametrize(
    ("kind", "options", "error", "text"),
    [
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
        pytest.param("windows", divided(2, 2), Unsupported, "no layer keeps more than a window", marks=SLOW),
    ],
)
def test_sizes_that_cannot_work_are_refused(models, make_llm, kind, options, error, text):
    with pytest.raises(error, match=text):
        make_llm(models[kind], **options)
