"""Embeddings as prompts, users' logits processors, scored candidates, repetition: in the whole engine."""

import functools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo import (
    AdapterLogitsProcessor,
    AsyncLLM,
    ConfigError,
    EngineArgs,
    FlatLogprobs,
    RepetitionDetectionParams,
    RequestError,
    SamplingParams,
    Unsupported,
)
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

pytestmark = pytest.mark.matrix(3)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
DRAWN = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True, detokenize=False)
PROMPTS = make_prompts(128)


def tokens(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def generate(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def embeds_prompts(path, prompts=PROMPTS):
    """The prompts as what transformers' embedding of the checkpoint makes of them."""
    embed = AutoModelForCausalLM.from_pretrained(path).get_input_embeddings()
    return [{"prompt_embeds": embed(torch.tensor(prompt))} for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"num_gpu_blocks_override": 106, "block_size": 4, "max_model_len": 140},  # some are preempted
        {"enable_prefix_caching": False},
    ],
    ids=["whole", "chunked", "preempted", "uncached"],
)
def test_embeddings_of_tokens_are_as_good_as_tokens(tiny_model, make_llm, options):
    llm = make_llm(tiny_model, enable_prompt_embeds=True, **options)
    given = embeds_prompts(tiny_model)
    mixed = [prompt for pair in zip(given, PROMPTS, strict=True) for prompt in pair]
    for params in (GREEDY, DRAWN):
        found = tokens(generate(llm, mixed, params))
        assert found[::2] == found[1::2]
    if "num_gpu_blocks_override" in options:
        assert llm.llm_engine.stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("GPT2LMHeadModel", {}),  # learned positions are added
        ("OPTForCausalLM", {"word_embed_proj_dim": 32}),  # narrower than the hidden states
        ("Gemma2ForCausalLM", {}),  # scaled
    ],
)
def test_what_the_oracles_embedding_gives_is_taken(make_llm, tmp_path, architecture, overrides):
    oracle = make_oracle(tiny_config(architecture) | overrides)
    llm = make_llm(save(oracle, tmp_path), enable_prompt_embeds=True)
    embed = oracle.get_input_embeddings()
    given = [{"prompt_embeds": embed(torch.tensor(prompt))} for prompt in PROMPTS]
    assert tokens(generate(llm, given)) == tokens(generate(llm, PROMPTS))


def test_blocks_are_shared_by_equal_embeddings_only(tiny_llama, make_llm):
    llm = make_llm(tiny_llama, enable_prompt_embeds=True)
    [given] = embeds_prompts(tiny_llama, PROMPTS[-1:])
    length = len(PROMPTS[-1])
    first, again = generate(llm, [given])[0], generate(llm, [given])[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, length // 16 * 16)
    assert tokens([first]) == tokens([again])
    for other in (
        [0] * length,
        PROMPTS[-1],
        {"prompt_embeds": given["prompt_embeds"] * 1.001},
        given | {"cache_salt": "a"},
    ):
        assert generate(llm, [other])[0].num_cached_tokens == 0


def test_penalties_count_no_placeholders(tiny_llama, make_llm):
    llm = make_llm(tiny_llama, enable_prompt_embeds=True)
    [given] = embeds_prompts(tiny_llama, PROMPTS[-1:])
    params = SamplingParams(temperature=0, max_tokens=8, repetition_penalty=1.8, detokenize=False)
    params.logit_bias = {0: 50.0}  # the token of the placeholders is the greedy one
    assert generate(llm, [given], params)[0].outputs[0].token_ids[0] == 0


def test_embeddings_are_refused_unless_asked_for(tiny_llama, make_llm):
    [given] = embeds_prompts(tiny_llama, PROMPTS[-1:])
    with pytest.raises(RequestError, match="enable_prompt_embeds=True"):
        generate(make_llm(tiny_llama), [given])


def test_functions_of_requests(tiny_llama, make_llm):
    llm = make_llm(tiny_llama)

    def count_up(output_ids, logits):
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(50 + len(output_ids)), 0.0)

    def stumble(prompt_ids, output_ids, logits):
        assert prompt_ids == PROMPTS[1]
        if len(output_ids) == 3:
            raise RuntimeError("no more")
        return logits

    plain = tokens(generate(llm, PROMPTS[:3]))
    own = functools.partial(SamplingParams, max_tokens=12, ignore_eos=True, detokenize=False)
    params = [
        own(seed=1, n=2, logits_processors=[count_up]),
        own(seed=1, logits_processors=[stumble]),
        GREEDY,
    ]
    counted, stumbled, undisturbed = generate(llm, PROMPTS[:3], params)
    assert [c.token_ids for c in counted.outputs] == [list(range(50, 62))] * 2
    assert (len(stumbled.outputs[0].token_ids), stumbled.outputs[0].finish_reason) == (3, "error")
    assert stumbled.outputs[0].error == "The request's logits processor failed: RuntimeError: no more"
    assert tokens([undisturbed]) == plain[2:]
    assert llm.llm_engine.stats.num_blocks_used == 0


def test_functions_survive_preemption(tiny_llama, make_llm):
    def avoid_the_last(output_ids, logits):
        logits[output_ids[-3:]] = -torch.inf
        return logits

    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, detokenize=False, logits_processors=[avoid_the_last]
    )
    work = make_prompts(128, (40,) * 8)
    tight = make_llm(tiny_llama, num_gpu_blocks_override=60, block_size=4, max_model_len=140)
    assert tokens(generate(tight, work, params)) == tokens(generate(make_llm(tiny_llama), work, params))
    assert tight.llm_engine.stats.num_preemptions > 0


class Favourite(AdapterLogitsProcessor):
    """Requests may name a token that is always chosen."""

    @classmethod
    def validate_params(cls, params):
        if not isinstance((params.extra_args or {}).get("favourite", 0), int):
            raise ValueError("favourite must be a token id")

    def new_req_logits_processor(self, params):
        favourite = (params.extra_args or {}).get("favourite")
        if favourite is None:
            return None

        def favour(output_ids, logits):
            logits[favourite] = 1000
            return logits

        return favour


@pytest.mark.parametrize("name", [Favourite, f"{__name__}:Favourite", f"{__name__}.Favourite"], ids=str)
def test_processors_of_the_engine(tiny_llama, make_llm, name):
    llm = make_llm(tiny_llama, logits_processors=[name])
    wanted = SamplingParams(max_tokens=4, detokenize=False, extra_args={"favourite": 77})
    favoured, plain = generate(llm, PROMPTS[:2], [wanted, GREEDY])
    assert favoured.outputs[0].token_ids == [77] * 4
    assert tokens([plain]) == tokens(generate(make_llm(tiny_llama), PROMPTS[1:2]))
    with pytest.raises(RequestError, match="favourite must be a token id"):
        generate(llm, PROMPTS[:1], SamplingParams(extra_args={"favourite": "x"}, detokenize=False))


def test_processors_that_cannot_be_loaded(tiny_llama, make_llm):
    class Local(Favourite):
        pass

    for wrong, text in (
        (Local, "defined inside a function or class"),
        ("favourite", "names like package.module:Class"),
        (f"{__name__}:Nobody", "cannot be loaded"),
        ("collections:OrderedDict", "not derived from"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_llm(tiny_llama, logits_processors=[wrong])


async def test_another_process(tiny_llama, make_llm):
    """What crosses the border (names, embeddings), and what does not (functions)."""
    args = EngineArgs(
        model=str(tiny_llama),
        dtype="float32",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=200,
        enable_prompt_embeds=True,
        logits_processors=["octavo.runtime.sampling.processors:LogitBias"],  # a second time
    )
    engine = AsyncLLM.from_engine_args(args)
    biased = SamplingParams(temperature=0, max_tokens=6, logit_bias={9: 2.5}, detokenize=False)
    twice = SamplingParams(temperature=0, max_tokens=6, logit_bias={9: 5.0}, detokenize=False)
    [given] = embeds_prompts(tiny_llama, PROMPTS[-1:])
    try:
        outputs = [output async for output in engine.generate(given, biased)]
        with pytest.raises(Unsupported, match="AsyncLLM"):
            async for _ in engine.generate([1], SamplingParams(logits_processors=[max], detokenize=False)):
                pass
    finally:
        await engine.shutdown()
    assert tokens(outputs[-1:]) == tokens(generate(make_llm(tiny_llama), PROMPTS[-1:], twice))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"num_gpu_blocks_override": 60, "block_size": 4, "max_model_len": 140},
    ],
    ids=["whole", "chunked", "preempted"],
)
@pytest.mark.parametrize("flat", [False, True])
def test_scored_candidates(tiny_llama, make_llm, options, flat):
    llm = make_llm(tiny_llama, max_logprobs=-1, **options)
    prompts = make_prompts(128, (30, 40, 50, 20, 33, 41))
    whole = generate(make_llm(tiny_llama, max_logprobs=-1), prompts, _scoring(prompt_logprobs=-1))
    start = 11
    one_list = _scoring(prompt_logprob_token_ids=[4, 100, 4], prompt_logprob_start=start, flat_logprobs=flat)
    lists = [
        [[[], [position % 128, 5], [5]][position % 3] for position in range(start, len(prompt) - 1)]
        for prompt in prompts
    ]
    own_lists = [
        _scoring(prompt_logprob_token_ids=ids, prompt_logprob_start=start, prompt_logprobs=2) for ids in lists
    ]
    for outputs, wanted in (
        (generate(llm, prompts, one_list), [[[4, 100, 4]] * len(ids) for ids in lists]),
        (generate(llm, prompts, own_lists), lists),
    ):
        for output, reference, ids in zip(outputs, whole, wanted, strict=True):
            expected = [
                [position[i].logprob for i in row]
                for position, row in zip(reference.prompt_logprobs[start + 1 :], ids, strict=True)
            ]
            assert len(output.prompt_token_id_logprobs) == len(expected)
            for found, row in zip(output.prompt_token_id_logprobs, expected, strict=True):
                assert found == pytest.approx(row, abs=1e-4)
    assert output.prompt_logprobs[0] is None
    assert [] in output.prompt_token_id_logprobs
    assert all(len(position) in (2, 3) for position in output.prompt_logprobs[1:])


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 4}])
def test_scores_behind_a_cached_prefix_stand_where_they_belong(tiny_llama, make_llm, options):
    llm = make_llm(tiny_llama, **options)
    [prompt] = make_prompts(128, (40,))
    wanted = {"prompt_logprobs": 1, "prompt_logprob_token_ids": [4, 100], "prompt_logprob_start": 5}
    [whole] = generate(llm, [prompt], _scoring(**wanted))
    [found] = generate(llm, [prompt], _scoring(**wanted, skip_reading_prefix_cache=False))
    cached = found.num_cached_tokens
    assert cached == 32
    assert found.prompt_logprobs == [None] * (cached + 1) + whole.prompt_logprobs[cached + 1 :]
    unscored = cached - wanted["prompt_logprob_start"]
    scores = whole.prompt_token_id_logprobs[unscored:]
    assert found.prompt_token_id_logprobs == [[]] * unscored + scores


def _scoring(**params):
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, **params)


def test_listed_and_flat_logprobs(tiny_llama, make_llm):
    llm = make_llm(tiny_llama)
    listed = _scoring(logprob_token_ids=list(range(60, 90)), flat_logprobs=True)
    nested = _scoring(logprob_token_ids=list(range(60, 90)))
    [flat], [plain] = generate(llm, PROMPTS[:1], listed), generate(llm, PROMPTS[:1], nested)
    assert isinstance(flat.outputs[0].logprobs, FlatLogprobs)
    assert flat.outputs[0].logprobs == plain.outputs[0].logprobs
    for chosen, position in zip(plain.outputs[0].token_ids, plain.outputs[0].logprobs, strict=True):
        assert list(position) == list(dict.fromkeys([chosen, *range(60, 90)]))
    ranks = np.array(
        [[entry.rank for entry in p.values()] for p in plain.outputs[0].logprobs if len(p) == 31]
    )
    assert ranks.min() == 1 and ranks.max() <= llm.llm_engine.config.checkpoint.vocab_size


def test_repetition_ends_a_request(tiny_llama, make_llm):
    detection = RepetitionDetectionParams(max_pattern_size=5, min_pattern_size=1, min_count=4)
    params = [
        SamplingParams(max_tokens=50, allowed_token_ids=[7], detokenize=False, repetition_detection=given)
        for given in (detection, None)
    ]
    ended, length = generate(make_llm(tiny_llama), PROMPTS[:2], params)
    assert ended.outputs[0].token_ids == [7] * 4
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == (
        "repetition",
        "repetition_detected",
    )
    assert (len(length.outputs[0].token_ids), length.outputs[0].finish_reason) == (50, "length")
