"""Guessing tokens ahead changes no text, whatever is asked of the tokens and whatever is guessed.

Guesses that need not come true are made for a tiny random model with the default model's vocabulary.
"""

import numpy as np
import pytest

from octavo import LLM, BeamSearchParams, RequestError, SamplingParams, StructuredOutputsParams
from octavo.engine.speculation.drafting import Drafting
from octavo.engine.speculation.guess import Guess
from octavo.engine.speculation.step_costs import StepCosts
from octavo.engine.speculation.token_run import Match
from octavo.engine.structured.guidance import GuidanceBackend
from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.worker.chained_steps import ChainedSteps
from tests.tiny_models import make_oracle, save, tiny_config

PARAMS = {
    "greedy": {},
    "drawn": {"temperature": 0.6, "seed": 3},
    "truncated": {"temperature": 1.0, "seed": 4, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "penalties, drawn": {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {5: 3.0, 9: -100.0}, "temperature": 0.7, "seed": 6},
    "bad words": {"bad_words": [" the", " a b"]},
    "least": {"min_tokens": 20, "stop_token_ids": [260, 354]},
    "logprobs": {"logprobs": 3, "temperature": 0.5, "seed": 7},
    "prompt": {"prompt_logprobs": 1},
    "three": {"n": 3, "temperature": 0.9, "seed": 8},
    "stop": {"stop": ["two", "\n\n"]},
    "regex": {"structured_outputs": StructuredOutputsParams(regex=r"( one two three,){3,9}( \d+){4}")},
    "schema": {
        "structured_outputs": StructuredOutputsParams(
            json={"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 5, "maxItems": 9}
        ),
        "temperature": 0.8,
        "seed": 9,
    },
}
PROMPTS = [
    "one two three, one two three, one two three, one two",
    "The capital of France is",
]

BOUNDS = {"max_model_len": 256, "num_gpu_blocks_override": 700}


@pytest.fixture(autouse=True)
def every_guess_is_tried(monkeypatch):
    """As if more rows cost nothing."""
    monkeypatch.setattr(StepCosts, "of", lambda costs, rows, more: np.ones(more + 1))


def work():
    return [
        SamplingParams(**({"max_tokens": 24, "temperature": 0.0} | PARAMS[name]))
        for name in PARAMS
        for _ in PROMPTS
    ], PROMPTS * len(PARAMS)


def results(llm, **options):
    params, prompts = work()
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    return [
        ([(o.text, o.token_ids, o.logprobs, o.finish_reason) for o in out.outputs], out.prompt_logprobs)
        for out in outputs
    ]  # fmt: skip


def drafted(llm):
    """Tokens that were guessed, and those that came true."""
    values = {metric.name: metric for metric in llm.get_metrics()}
    names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    return [values[f"vllm:{name}"].value for name in names]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, smollm2_path):
    """Options of the tiny model."""
    config = tiny_config("LlamaForCausalLM") | {"vocab_size": 49152}
    path = save(make_oracle(config), tmp_path_factory.mktemp("wide-llama"))
    return {"model": str(path), "tokenizer": str(smollm2_path), "dtype": "float32", **BOUNDS}


@pytest.fixture(scope="module")
def plain(smollm2_path):
    with LLM(str(smollm2_path), **BOUNDS) as llm:
        return results(llm)


@pytest.fixture(scope="module")
def tiny_plain(tiny):
    with LLM(**tiny) as llm:
        return results(llm)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}},
        {"speculative_config": {"method": "suffix"}, "num_gpu_blocks_override": 60},
    ],
    ids=["ngram", "suffix, preemption"],
)
def test_texts_are_the_same(smollm2_path, plain, options):
    with LLM(str(smollm2_path), **BOUNDS | options) as llm:
        assert results(llm) == plain
        num_guessed, num_accepted = drafted(llm)
    assert num_accepted > 20, "hardly a guess came true"
    assert num_guessed > num_accepted, "no guess was wrong"


@pytest.mark.slow
def test_steps_in_flight_change_nothing(tiny, tiny_plain):
    """There the last token is hardly ever known in time."""
    with LLM(**tiny, spec_method="ngram", steps_in_flight=2, max_num_seqs=7) as llm:
        assert results(llm) == tiny_plain


@pytest.mark.matrix
@pytest.mark.parametrize("shift", [0, 1], ids=["", "shifted"])
def test_chained_steps_change_nothing(tiny, monkeypatch, shift):
    """The next step verifies what follows if all drafts come true; shifted, the negative twin: see there."""
    monkeypatch.setattr(CPUPlatform, "graph_capture", lambda platform: lambda work: work)
    verify, noted = ChainedSteps.verify, []

    def verified(steps, inputs, *rest):
        lasts = verify(steps, inputs, *rest)
        noted.append(int((inputs.num_known >= 0).sum()))
        steps.state.lengths -= shift
        return lasts

    monkeypatch.setattr(ChainedSteps, "verify", verified)
    names = ["greedy", "drawn", "truncated", "three", "stop"]
    params = [SamplingParams(**({"temperature": 0.0} | PARAMS[name] | {"max_tokens": 60})) for name in names]

    def texts(llm):
        outputs = llm.generate(PROMPTS[:1] * len(params), params, use_tqdm=False)
        return [each.token_ids for out in outputs for each in out.outputs]

    with LLM(**tiny) as llm:
        plain = texts(llm)
    config = {"method": "suffix", "num_speculative_tokens": 4, "enable_adaptive_verification": False}
    with LLM(**tiny, speculative_config=config, steps_in_flight=2, max_num_seqs=64) as llm:
        assert texts(llm) == plain or shift
        again = texts(llm)  # suffixes of all outputs are known
        assert (again == plain) != shift
        assert drafted(llm)[1] > 50 or shift
    assert sum(noted) > 50


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 4])
def test_stages_change_nothing(tiny, monkeypatch, steps):
    """Guessed is what follows in the known texts: right behind three tokens of an output, wrong elsewhere.

    With four steps in flight, as on GPUs, requests wait for tokens behind which there are such drafts.
    """
    params = [SamplingParams(max_tokens=24, **({"temperature": 0} | PARAMS[name])) for name in PARAMS]
    prompts = [PROMPTS[1]] * len(params)

    def texts(llm):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [each.token_ids for out in outputs for each in out.outputs]

    with LLM(**tiny) as llm:
        plain = texts(llm)
    known = {tuple(ids[i : i + 3]): ids[i + 3 :] for ids in plain for i in range(len(ids) - 3)}

    def ahead(guess, count):
        return (known.get(tuple(guess.own.last(3)), []) + [5] * count)[:count]

    guess_by(monkeypatch, ahead)
    options = {
        "spec_method": "ngram",
        "spec_tokens": 4,
        "pipeline_parallel_size": 2,
        "steps_in_flight": steps,
    }
    with LLM(**tiny, **options) as llm:
        assert texts(llm) == plain
        num_guessed, num_accepted = drafted(llm)
    assert num_guessed > num_accepted > 40


def guess_by(monkeypatch, ahead, length=0):
    """Guess what a function makes of a guess and a number of tokens, whatever was matched."""

    def search(drafting, request, guess):
        guess.match = Match(guess.own, 0, length)

    monkeypatch.setattr(Guess, "ahead", ahead)
    monkeypatch.setattr(Drafting, "_search", search)


def continuations(outputs):
    """What came behind each pair of tokens."""
    return {tuple(ids[i : i + 2]): list(ids[i + 2 :]) for ids in outputs for i in range(len(ids) - 1)}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["random", "end", "prefixes"])
def test_hostile_guesses_change_nothing(tiny, tiny_plain, monkeypatch, kind):
    """prefixes: texts of the grammars, cut anywhere, then a token that ends the text."""
    noise, places = (
        np.random.default_rng(1),
        [name in ("regex", "schema") for name in PARAMS for _ in PROMPTS],
    )
    found = [texts for is_grammar, (texts, _) in zip(places, tiny_plain, strict=True) if is_grammar]
    known, cuts = continuations(ids for texts in found for _, ids, *_ in texts), set()

    def prefix(guess, count):
        ids = known.get(tuple(guess.own.last(2)), [])[: noise.integers(0, count + 1)]
        cuts.add(len(ids))
        return (ids + [2] * count)[:count]

    guess_by(
        monkeypatch,
        lambda guess, count: {
            "random": lambda: noise.integers(0, 49152, count).tolist(),
            "end": lambda: [2] * count,
            "prefixes": lambda: prefix(guess, count),
        }[kind](),
    )
    with LLM(**tiny, spec_method="ngram", spec_tokens=4) as llm:
        assert results(llm) == tiny_plain
        num_guessed, num_accepted = drafted(llm)
    assert num_guessed > 100
    assert kind != "prefixes" or (num_accepted > 20 and cuts >= {0, 1, 2, 3, 4})


@pytest.mark.matrix
def test_guesses_end_where_the_context_does(tiny, monkeypatch):
    """What comes is guessed, then others beyond the last token that there is room for."""
    names = ["greedy", "drawn", "penalties", "stop", "regex"]
    params = [
        SamplingParams(**({"temperature": 0.0} | PARAMS[name] | {"max_tokens": None})) for name in names
    ]
    options = tiny | {"max_model_len": 48}

    def found(llm):
        outputs = llm.generate(PROMPTS[:1] * len(params), params, use_tqdm=False)
        return [(len(out.prompt_token_ids), out.outputs[0]) for out in outputs]

    with LLM(**options) as llm:
        plain = found(llm)
    known = continuations(out.token_ids for _, out in plain)
    guess_by(
        monkeypatch, lambda guess, count: (known.get(tuple(guess.own.last(2)), []) + [7] * count)[:count]
    )
    with LLM(**options, spec_method="ngram", spec_tokens=6) as llm:
        again, (num_guessed, num_accepted) = found(llm), drafted(llm)
    assert [(out.token_ids, out.finish_reason) for _, out in again] == [
        (out.token_ids, out.finish_reason) for _, out in plain
    ]
    assert [start + len(out.token_ids) for start, out in again[:3]] == [48] * 3
    assert num_guessed > num_accepted > 40


@pytest.mark.slow
def test_processors_that_see_refused_drafts_are_noticed(smollm2_path, monkeypatch):
    """The negative twin: without the order of places, penalties count tokens that were not kept."""

    def at_once(sampler, logits, rows, positions, masks, expected):
        return sampler.sample(logits, rows, positions, masks)

    prompts = [" ".join([word] * 9) for word in ("one", "two", "red", "a b", "x =", "yes no")]
    params = SamplingParams(max_tokens=40, temperature=0, presence_penalty=1.0)

    def texts():
        with LLM(str(smollm2_path), **BOUNDS, spec_method="ngram", spec_tokens=6) as llm:
            return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]

    expected = texts()
    monkeypatch.setattr("octavo.runtime.heads.token.sample_in_order", at_once)
    assert texts() != expected


@pytest.mark.matrix
@pytest.mark.parametrize("shift", [0, 1])
def test_a_draft_of_the_text_itself_always_comes_true(smollm2_path, monkeypatch, shift):
    params = SamplingParams(max_tokens=30, temperature=0.7, seed=1)
    with LLM(str(smollm2_path), **BOUNDS) as llm:
        [out] = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    known = [*out.prompt_token_ids, *out.outputs[0].token_ids]

    def ahead(guess, count):
        return [(token + shift) % 49152 for token in known[len(guess.own) :][:count]]

    guess_by(monkeypatch, ahead, length=1)
    with LLM(str(smollm2_path), **BOUNDS, spec_method="ngram", spec_tokens=4) as llm:
        assert (
            llm.generate(PROMPTS[:1], params, use_tqdm=False)[0].outputs[0].token_ids
            == out.outputs[0].token_ids
        )
        num_guessed, num_accepted = drafted(llm)
    assert num_guessed > 20 and num_accepted == (0 if shift else num_guessed)


@pytest.mark.matrix
@pytest.mark.parametrize("is_hostile", [False, True])
def test_what_a_grammar_determines_is_guessed(smollm2_path, monkeypatch, is_hostile):
    """In other tokens than the model takes, if the back end says so: then nothing comes true but the text."""
    schema = {
        "type": "object",
        "properties": {"customer name": {"enum": ["Smith", "Jones"]}, "order status": {"const": "waiting"}},
        "required": ["customer name", "order status"],
        "additionalProperties": False,
    }
    constraint = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    params = [
        SamplingParams(max_tokens=40, temperature=t, seed=2, structured_outputs=constraint) for t in (0, 0.9)
    ]
    options = {"max_model_len": 256, "num_gpu_blocks_override": 700}

    def texts(llm):
        return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params, use_tqdm=False)]

    with LLM(str(smollm2_path), **options) as llm:
        plain = texts(llm)
    if is_hostile:
        monkeypatch.setattr(GuidanceBackend, "forced", lambda backend, matcher: [5, 260, 2, 11])
    with LLM(str(smollm2_path), **options, spec_method="jump_ahead") as llm:
        assert texts(llm) == plain
        num_guessed, num_accepted = drafted(llm)
        llm.generate(PROMPTS, SamplingParams(max_tokens=9), use_tqdm=False)
        assert drafted(llm)[0] == num_guessed, "without a grammar nothing is guessed"
    assert (num_accepted < 3) if is_hostile else (8 < num_accepted <= num_guessed)


def test_counts_of_one_request(tiny):
    """They add up: each draft brings its tokens that came true and one more."""
    options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    with LLM(**tiny, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": [5, 6, 7] * 8}] * 2, params, use_tqdm=False)
        stats = llm.llm_engine.stats
    found = [output.outputs[0].spec_decode_metrics for output in outputs]
    assert sum(each.num_draft_tokens for each in found) == stats.num_draft_tokens > 0
    assert sum(sum(each.histogram) for each in found) == stats.num_drafts
    assert sum(each.num_accepted_tokens for each in found) == stats.num_accepted_tokens > 0
    by_place = [sum(sum(each.histogram[place:]) for each in found) for place in (1, 2, 3)]
    assert by_place == stats.num_accepted_by_position
    with LLM(**tiny) as llm:
        [plain] = llm.generate({"prompt_token_ids": [5, 6, 7] * 8}, params, use_tqdm=False)
    assert plain.outputs[0].spec_decode_metrics is None
    assert plain.outputs[0].token_ids == outputs[0].outputs[0].token_ids


@pytest.mark.slow
def test_drafts_pass_the_end_of_reasoning(tiny, monkeypatch):
    """A budget closes it inside a draft, and the form holds from the token behind."""
    form = StructuredOutputsParams(regex=r"(one|two|red) (\d+,){3,9}", after_reasoning=True)
    prompts = [{"prompt_token_ids": [5, 6, 7] * 8 + [place]} for place in range(6)]
    params = [
        SamplingParams(
            temperature=0.9 * (i % 2), seed=i, thinking_token_budget=5 + i, max_tokens=40, logprobs=1
        )
        for i in range(6)
    ]
    for each in params:
        each.structured_outputs = form

    def found(llm):
        outputs = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        return [(out.text, out.token_ids, out.logprobs) for out in outputs]

    options = tiny | {"reasoning_parser": "deepseek_r1"}
    with LLM(**options) as llm:
        plain = found(llm)
    assert all(text.partition("</think>")[2] for text, *_ in plain)
    known = continuations(ids for _, ids, _ in plain)
    guess_by(
        monkeypatch, lambda guess, count: (known.get(tuple(guess.own.last(2)), []) + [7] * count)[:count]
    )
    with LLM(**options, spec_method="ngram", spec_tokens=6) as llm:
        assert found(llm) == plain
        num_guessed, num_accepted = drafted(llm)
    assert num_guessed > num_accepted > 15


def test_one_seat_leaves_room_for_drafts(tiny):
    """The option bounds requests, not rows of a step."""
    options, made = {"method": "ngram", "num_speculative_tokens": 3}, []
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    for given in ({}, options):
        with LLM(**tiny, max_num_seqs=1, speculative_config=given) as llm:
            outputs = llm.generate([{"prompt_token_ids": [5, 6, 7] * 8}] * 2, params, use_tqdm=False)
            made.append([out.outputs[0].token_ids for out in outputs])
            stats = llm.llm_engine.stats
    assert made[0] == made[1]
    assert stats.num_draft_tokens > 2 * stats.num_drafts > 0


@pytest.mark.slow
def test_budgets_beams_and_swaps_change_nothing(tiny):
    """A budget closes reasoning at its place; beams, and blocks that come from the host, see true tokens."""
    prompts = [{"prompt_token_ids": [5, 6, 7] * 8 + [place]} for place in range(8)]
    budget = SamplingParams(temperature=0, max_tokens=40, thinking_token_budget=9, ignore_eos=True)
    long = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=12)
    options = {"reasoning_parser": "deepseek_r1", "swap_space": 0.1, "block_size": 16, "max_num_seqs": 8}
    made = []
    for given in ({}, {"spec_method": "ngram", "spec_tokens": 4}):
        with LLM(**tiny | options | {"num_gpu_blocks_override": 24}, **given) as llm:
            made.append([out.outputs[0].token_ids for out in llm.generate(prompts, budget, use_tqdm=False)])
            closing = llm.get_tokenizer().encode("</think>", add_special_tokens=False)
            made[-1] += [out.outputs[0].token_ids for out in llm.generate(prompts, long, use_tqdm=False)]
            made[-1] += [each.tokens for out in llm.beam_search(prompts[:2], beams) for each in out.sequences]
            values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    assert made[0] == made[1]
    assert all(list(ids[9 : 9 + len(closing)]) == closing for ids in made[1][:8])
    assert values["vllm:num_preemptions"] > 0 and values["vllm:spec_decode_num_accepted_tokens"] > 50


def test_a_request_may_do_without(smollm2_path):
    with LLM(str(smollm2_path), **BOUNDS, spec_method="ngram") as llm:
        for asked in (False, {"num_tokens": 0}):
            llm.generate(PROMPTS[:1], SamplingParams(max_tokens=20), use_tqdm=False, speculative=asked)
        assert drafted(llm) == [0, 0]
        llm.generate(
            PROMPTS[:1],
            SamplingParams(max_tokens=20, temperature=0),
            use_tqdm=False,
            speculative={"num_tokens": 2},
        )
        assert 0 < drafted(llm)[0] <= 2 * 20
        for wrong in ("yes", {"num_tokens": 129}, {"num_tokens": True}, {"tokens": 2}, 3):
            with pytest.raises(RequestError, match="speculative must be true, false, or"):
                llm.generate(PROMPTS[:1], SamplingParams(), use_tqdm=False, speculative=wrong)
