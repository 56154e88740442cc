"""Stages, ranks and replicas give the tokens of one device through the whole engine."""

import pytest

from octavo import SamplingParams, StructuredOutputsParams
from octavo.base.errors import ConfigError, Unsupported
from tests.tiny_models import make_oracle, save, tiny_config

SIZES = {"num_attention_heads": 8, "hidden_size": 64, "vocab_size": 49_153, "num_hidden_layers": 4}
OPTIONS = {"max_num_batched_tokens": 32, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By number of key heads; the second has tied embeddings."""
    folder, config = tmp_path_factory.mktemp("models"), tiny_config("LlamaForCausalLM") | SIZES
    return {
        count: save(
            make_oracle(config | {"num_key_value_heads": count, "tie_word_embeddings": count == 1}),
            folder / str(count),
        )
        for count in (4, 1)
    }


def answers(llm):
    """Tokens and logprobs of requests in chunks, with shared beginnings, children, sleep between."""
    prompts = [[i + 1] * (3 + 17 * i) for i in range(6)] + [[2] * 30]
    params = [
        SamplingParams(
            max_tokens=14, ignore_eos=True, detokenize=False, temperature=t, seed=3, n=n, logprobs=2,
            prompt_logprobs=1 if t == 0 else None,
        )
        for t, n in ((0.0, 1), (0.0, 1), (0.7, 2), (1.0, 3), (0.0, 1), (0.0, 1), (0.6, 1))
    ]  # fmt: skip
    found = []
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([[(c.token_ids, c.cumulative_logprob) for c in output.outputs] for output in outputs])
        llm.sleep()
        llm.wake_up()
    return found


@pytest.mark.parametrize(
    ("key_heads", "tp", "pp", "dp"),
    [
        pytest.param(4, 1, 2, 1, id="two stages", marks=pytest.mark.slow),
        pytest.param(1, 1, 3, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, 2, 1, marks=pytest.mark.slow),
        pytest.param(4, 4, 1, 1, marks=pytest.mark.slow),
        pytest.param(4, 1, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_many_equal_one(models, make_llm, key_heads, tp, pp, dp):
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp}
    one, many, again = (
        answers(make_llm(models[key_heads], **OPTIONS, **chosen, cpu_threads=1))
        for chosen in ({}, sizes, sizes)
    )
    assert many == again
    assert [[[c[0] for c in output] for output in run] for run in one] == [
        [[c[0] for c in output] for output in run] for run in many
    ]
    if tp == 1:
        assert one == many, "stages change no bit"


@pytest.mark.slow
def test_groups_of_several_kinds_and_grammars(tiny_gemma3, smollm2_path, make_llm):
    params = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, temperature=0.5, seed=1)
    prompts = [[i + 1] * (5 + 20 * i) for i in range(4)]
    form = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex=r"\d{3}-\d{2}")
    )
    texts = []
    for stages in (1, 2):
        llm = make_llm(tiny_gemma3, pipeline_parallel_size=stages)
        tokens = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        llm = make_llm(smollm2_path, pipeline_parallel_size=stages, skip_tokenizer_init=False)
        outputs = llm.generate(["My number is ", "A date: "], form, use_tqdm=False)
        texts.append((tokens, [output.outputs[0].text for output in outputs]))
    assert texts[0] == texts[1]
    assert all(len(text) == 6 for text in texts[0][1])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"pipeline_parallel_size": 5},
            ConfigError,
            "pipeline_parallel_size=5 is more than the model's 4 layers",
        ),
        ({"pipeline_parallel_size": 0}, ConfigError, "Invalid pipeline parallel size: 0"),
        ({"pipeline_parallel_size": 2, "runner": "pooling"}, Unsupported, "pooling models run in one stage"),
        (
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "inproc"},
            ConfigError,
            "pipeline_parallel_size > 1",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 2},
            ConfigError,
            r"data_parallel_rank \(2\) must be less than data_parallel_size \(2\)",
        ),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 2},
            ConfigError,
            "data_parallel_size_local=2 and data_parallel_start_rank=0 of 4 replicas need data_parallel_",
        ),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 3}
            | {"data_parallel_hybrid_lb": True},
            ConfigError,
            r"data_parallel_start_rank \(3\) \+ that at most data_parallel_size \(4\)",
        ),
        (
            {"tensor_parallel_size": 3},
            ConfigError,
            r"attention heads \(8\) must be divisible by tensor parallel size \(3\)",
        ),
    ],
)
def test_sizes_that_cannot_work_are_refused(models, make_llm, options, error, text):
    with pytest.raises(error, match=text):
        make_llm(models[4], **options)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_experts_spread_over_ranks(tmp_path, make_llm, stages):
    folder = save(make_oracle(tiny_config("Qwen3MoeForCausalLM")), tmp_path)
    params = SamplingParams(max_tokens=14, ignore_eos=True, detokenize=False, temperature=0)
    prompts = [[i + 1] * (3 + 17 * i) for i in range(5)]
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": stages, "enable_expert_parallel": True}
    one, many, again = (
        [
            output.outputs[0].token_ids
            for output in make_llm(folder, **OPTIONS, **chosen, cpu_threads=1).generate(
                prompts, params, use_tqdm=False
            )
        ]
        for chosen in ({}, sizes, sizes)
    )
    assert one == many == again
