"""Every pair of sampling features, under every way the engine may treat a request: equal to its solo run.

One request per pair; they run together in an engine that chunks, caches, preempts, swaps or forks, and
each must give the text, tokens, logprobs and reasons that it gives alone. A tiny random model (float32) with
the real vocabulary of the default model, so that stop strings and bad words mean something.
Each condition meets every feature, and a third of the pairs, so that each pair meets two of the six;
OCTAVO_ALL_PAIRS=1 takes all of them under all.
"""

import itertools
import os
import random

import pytest

from octavo import SamplingParams
from tests.tiny_models import make_oracle, save, tiny_config

pytestmark = pytest.mark.matrix(3)

VOCAB_SIZE = 49152
NUM_TOKENS = 12
COMMON = [11, 12, 13, 14, 15, 300, 400, 500]

FEATURES = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.2},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "logit_bias": {"logit_bias": dict.fromkeys(COMMON, 8.0)},
    "allowed_token_ids": {"allowed_token_ids": [*COMMON, *range(1000, 1200)]},
    "forbidden_token_ids": {"forbidden_token_ids": list(range(0, VOCAB_SIZE, 3))},
    "bad_words": {"bad_words": ["the", " a", "ing"]},
    "min_tokens": {"min_tokens": 5},
    "stop_token_ids": {"stop_token_ids": list(range(0, VOCAB_SIZE, 7))},
    "stop": {"stop": ["e", "st"]},
    "logprobs": {"logprobs": 2},
    "structured_outputs": {"structured_outputs": {"regex": "[a-z ,.]{0,60}[A-Z]?"}},
    "thinking_token_budget": {"thinking_token_budget": 3},
}
EXCLUSIVE = {("structured_outputs", "thinking_token_budget")}
PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if pair not in EXCLUSIVE]
REASONING_PARSER = "deepseek_r1"
"""Of models that reason from the first token."""

CONDITIONS = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 12},
    "preempted": {"num_gpu_blocks_override": 50, "block_size": 4, "max_model_len": 64},
    "swapped": {"num_gpu_blocks_override": 50, "block_size": 4, "max_model_len": 64, "swap_space": 0.01},
    "two_in_flight": {"steps_in_flight": 2},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = tiny_config("LlamaForCausalLM") | {"vocab_size": VOCAB_SIZE}
    return save(make_oracle(config), tmp_path_factory.mktemp("wide-llama"))


@pytest.fixture
def make(checkpoint, make_llm, smollm2_path):
    def engine(**options):
        tokens = {"skip_tokenizer_init": False, "tokenizer": str(smollm2_path)}
        return make_llm(checkpoint, reasoning_parser=REASONING_PARSER, **tokens, **options)

    return engine


def chosen(place):
    """Places of the pairs that the condition at `place` meets."""
    places = random.Random(4).sample(range(len(PAIRS)), len(PAIRS))
    return places if os.environ.get("OCTAVO_ALL_PAIRS") else places[place % 3 :: 3]


def some_requests(places, num_sequences=1):
    """Pairs, prompts and parameters at these places."""
    made = list(requests(num_sequences))
    return zip(*[(PAIRS[place], *made[place]) for place in places], strict=True)


def requests(num_sequences=1):
    """(prompt, parameters) for every pair; half of the prompts share a beginning."""
    generator = random.Random(3)
    beginning = [generator.randrange(VOCAB_SIZE) for _ in range(20)]
    for index, pair in enumerate(PAIRS):
        own = [generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(2, 20))]
        options = {"temperature": 1.0} | FEATURES[pair[0]] | FEATURES[pair[1]]
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=index, n=num_sequences, **options)
        yield (beginning + own if index % 2 else own), params


def facts(completion):
    return (
        completion.text,
        list(completion.token_ids),
        completion.logprobs,
        completion.finish_reason,
        completion.stop_reason,
    )


@pytest.fixture(scope="module")
def solo(checkpoint, smollm2_path):
    """Each request alone in an engine that caches nothing; by (prompt, seed)."""
    from octavo import LLM

    known = {}

    def run(prompt, params):
        key = (tuple(prompt), params.seed)
        if key not in known:
            [output] = llm.generate([prompt], params, use_tqdm=False)
            known[key] = facts(output.outputs[0])
        return known[key]

    with LLM(
        str(checkpoint),
        tokenizer=str(smollm2_path),
        reasoning_parser=REASONING_PARSER,
        dtype="float32",
        enable_prefix_caching=False,
        num_gpu_blocks_override=50,
    ) as llm:
        yield run


@pytest.mark.parametrize("condition", CONDITIONS)
def test_pairs(condition, make, solo):
    llm = make(**CONDITIONS[condition])
    pairs, prompts, params = some_requests(chosen([*CONDITIONS].index(condition)))
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    for pair, prompt, param, output in zip(pairs, prompts, params, outputs, strict=True):
        assert facts(output.outputs[0]) == solo(prompt, param), pair
    if condition in ("preempted", "swapped"):
        assert llm.llm_engine.stats.num_preemptions > 0


def test_pairs_on_prefix_hits(make, solo):
    llm = make()
    pairs, prompts, params = some_requests(chosen(len(CONDITIONS)))
    for _ in range(2):
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
        for pair, prompt, param, output in zip(pairs, prompts, params, outputs, strict=True):
            assert facts(output.outputs[0]) == solo(prompt, param), pair
    assert sum(output.num_cached_tokens > 0 for output in outputs) > len(outputs) // 3


def test_each_condition_meets_every_feature_and_each_pair_two():
    met = [[PAIRS[i] for i in chosen(place)] for place in range(len(CONDITIONS) + 1)]
    assert all({name for pair in pairs for name in pair} == {*FEATURES} for pairs in met)
    assert all(sum(pairs.count(pair) for pairs in met) >= 2 for pair in PAIRS)


@pytest.mark.slow
def test_pairs_with_siblings(make, solo):
    every_third = chosen(0)[::3]  # each needs two more solo runs
    pairs, prompts, params = some_requests(every_third, num_sequences=3)
    outputs = make().generate(list(prompts), list(params), use_tqdm=False)
    for pair, prompt, param, output in zip(pairs, prompts, params, outputs, strict=True):
        for index, completion in enumerate(output.outputs):
            alone = param.clone()
            alone.n, alone.seed = 1, param.seed + index
            assert facts(completion) == solo(prompt, alone), (pair, index)


def test_the_end_of_reasoning_was_forced(make, solo, smollm2_path):
    """What `test_pairs` compares is there: three tokens of reasoning, the tag, and the answer."""
    budgeted = [(p, param) for p, param in requests() if param.thinking_token_budget is not None]
    tag = make().get_tokenizer().encode("</think>")
    for prompt, params in budgeted:
        _, ids, *_ = solo(prompt, params)
        assert ids[3 : 3 + len(tag)] == tag[: len(ids) - 3] or len(ids) < 4 or params.stop_strings
