"""Prompt forms, limits, defaults and the making of engine requests."""

import time
from dataclasses import replace
from typing import ClassVar

import msgspec
import pytest

from octavo.base.errors import PromptTooLong, RequestError
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.frontend.requests.options import TokenizationOptions
from octavo.messages.sampling import SamplingParams
from tests.fakes import ByteTokenizer, fake_config, options

TOKENIZER = ByteTokenizer()
VOCAB_SIZE = 300
MAX_LEN = 64


def config(*, generation=None, model=None, checkpoint=None):
    base = fake_config(max_model_len=MAX_LEN)
    checkpoint = replace(
        base.checkpoint,
        config={"vocab_size": VOCAB_SIZE} | (checkpoint or {}),
        generation_config=generation or {},
    )
    return replace(base, checkpoint=checkpoint, model=replace(base.model, **(model or {})))


def processor(tokenizer=TOKENIZER, **options):
    return InputProcessor(config(**options), tokenizer)


def process(prompt="abc", params=None, tokenizer=TOKENIZER, config_options=None, request_id=None, **keywords):
    ours = processor(tokenizer, **(config_options or {}))
    return ours.process(prompt, params, options(**keywords), request_id=request_id)


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("hi", "hi", [104, 105]),
        ([104, 105], None, [104, 105]),
        ((104, 105), None, [104, 105]),
        ({"prompt": "hi"}, "hi", [104, 105]),
        ({"prompt_token_ids": [104]}, None, [104]),
        ({"prompt": "known", "prompt_token_ids": [104]}, "known", [104]),
        ({"prompt": "hi", "multi_modal_data": None}, "hi", [104, 105]),
    ],
)
def test_prompt_forms(prompt, text, ids):
    prepared = process(prompt)
    assert (prepared.prompt, prepared.prompt_token_ids) == (text, ids)
    assert prepared.engine_requests[0].prompt_token_ids == ids


def test_numpy_ids_become_ints():
    import numpy as np

    (request,) = process(np.array([1, 2])).engine_requests
    assert request.prompt_token_ids == [1, 2]
    assert {type(i) for i in request.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        ("", RequestError, "The decoder prompt cannot be empty"),
        ([], RequestError, "The decoder prompt cannot be empty"),
        ({}, RequestError, "Either prompt or prompt_token_ids must be provided."),
        ({"prompt": 3}, RequestError, "prompt must be a string, got int"),
        (3, RequestError, "a string, a list of token ids or a dict, got int"),
        ([1, "a"], RequestError, "integers only"),
        ([1, True], RequestError, "integers only"),
        ([1, 2.0], RequestError, "integers only"),
        ([1, VOCAB_SIZE], RequestError, "Token id 300 is out of vocabulary"),
        ([1, -1], RequestError, "Token id -1 is out of vocabulary"),
        ({"prompt": "a", "cache_salt": ""}, RequestError, "cache_salt"),
        ({"prompt": "a", "cache_salt": 3}, RequestError, "cache_salt"),
        ({"prompt": "a", "multi_modal_data": {"image": b"x"}}, RequestError, "At most 0 image"),
        ("a\ud800", RequestError, "lone surrogate"),
        ("a" * MAX_LEN, PromptTooLong, "maximum context length is 64 tokens.*64 input tokens"),
        ([1] * (MAX_LEN + 5), PromptTooLong, "69 input tokens"),
    ],
)
def test_bad_prompts(prompt, error, text):
    with pytest.raises(error, match=text):
        process(prompt)


def test_absurdly_long_text_is_refused_before_it_is_tokenized():
    class Counting(ByteTokenizer):
        texts: ClassVar[list[str]] = []

        def encode_all(self, texts, add_special_tokens=True):
            self.texts += texts
            return super().encode_all(texts, add_special_tokens)

    absurd = "a" * (MAX_LEN * TOKENIZER.max_token_chars + 1)
    with pytest.raises(PromptTooLong, match="at least"):
        process(absurd, tokenizer=Counting())
    processor(Counting()).tokenized([absurd, "b", absurd, "c"], TokenizationOptions())
    assert Counting.texts == ["b", "c"]


@pytest.mark.parametrize("asked", [None, {"add_special_tokens": False}])
def test_several_texts_are_tokenized_at_once(asked):
    """And are then what they would have become one by one; anything else is left as it was."""
    mine, wanted = processor(), options(tokenization_kwargs=asked)
    prompts = ["first", [1, 2], {"prompt": "in a dict", "cache_salt": "mine"}, "sécond"]
    ready = mine.tokenized(prompts, wanted.tokenization)
    assert ready[1] == prompts[1] and ready[2].cache_salt == "mine"
    for prompt, given in zip(prompts, ready, strict=True):
        ids = mine.process(prompt, options=wanted).prompt_token_ids
        assert mine.process(given, options=wanted).prompt_token_ids == ids
    assert [ready[i].text for i in (0, 2, 3)] == ["first", "in a dict", "sécond"]


@pytest.mark.parametrize("prompts", [["one"], ["fine", "\ud800"], [[1], [2]]])
def test_nothing_is_tokenized_at_once_where_it_cannot_be(prompts):
    assert processor().tokenized(prompts, TokenizationOptions()) is prompts


@pytest.mark.parametrize(
    ("asked", "given"), [(None, MAX_LEN - 3), (1, 1), (MAX_LEN - 3, MAX_LEN - 3), (1000, MAX_LEN - 3)]
)
def test_max_tokens_fit_the_context(asked, given):
    (request,) = process("abc", SamplingParams(max_tokens=asked)).engine_requests
    assert request.limits.max_tokens == given


def test_truncation_and_special_tokens():
    def ids(**options):
        return process("abcdef", SamplingParams(max_tokens=60), tokenization_kwargs=options).prompt_token_ids

    assert ids(truncate_prompt_tokens=2) == [101, 102]
    assert ids(truncate_prompt_tokens=2, truncation_side="right") == [97, 98]
    assert ids(truncate_prompt_tokens=-1) == [99, 100, 101, 102]
    assert ids(truncate_prompt_tokens=64) == list(b"abcdef")
    long = process("a" * 5000, tokenization_kwargs={"truncate_prompt_tokens": 5})
    assert long.prompt_token_ids == [97] * 5
    for bad in (
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": 65},
        {"truncation_side": "up"},
        {"trunc": 1},
    ):
        with pytest.raises(RequestError):
            ids(**bad)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"logprobs": 21}, "Requested sample logprobs of 21, which is greater than max allowed: 20"),
        ({"prompt_logprobs": 21}, "Requested prompt logprobs of 21"),
        ({"logprobs": -1}, "logprobs of 300"),
        ({"stop_token_ids": [VOCAB_SIZE]}, r"\[300\] in stop_token_ids are out of vocabulary"),
        ({"logit_bias": {VOCAB_SIZE: 1.0, 1: 1.0}}, r"\[300\] in logit_bias"),
        ({"allowed_token_ids": [1, VOCAB_SIZE]}, "allowed_token_ids"),
        ({"forbidden_token_ids": [VOCAB_SIZE]}, "forbidden_token_ids"),
        ({"allowed_token_ids": [1, 2], "forbidden_token_ids": [2, 1, 3]}, "leaves no token"),
        ({"stop": [str(i) for i in range(65)]}, "at most 64"),
        ({"bad_words": [str(i) for i in range(129)]}, "at most 128"),
        ({"bad_words": ["x" * 2000]}, "at most 1024 tokens"),
    ],
)
def test_sampling_limits_of_the_model(params, text):
    with pytest.raises(RequestError, match=text):
        process("abc", SamplingParams(**params))


def test_logprobs_of_the_whole_vocabulary():
    options = {"model": {"max_logprobs": -1}}
    prepared = process("abc", SamplingParams(logprobs=-1, prompt_logprobs=-1), config_options=options)
    assert (prepared.params.logprobs, prepared.params.prompt_logprobs) == (VOCAB_SIZE, VOCAB_SIZE)


def test_bad_words_with_and_without_space(smollm2_path):
    from tests.real_tokenizers import real_tokenizer

    tokenizer = real_tokenizer(smollm2_path)
    options = {"checkpoint": {"vocab_size": 49152}}
    params = SamplingParams(bad_words=["Paris", " London", "🤗"])
    prepared = process("abc", params, tokenizer=tokenizer, config_options=options)
    words = ["".join(map(tokenizer.token_text, ids)) for ids in prepared.params.bad_words_token_ids]
    assert words[:3] == ["Paris", " Paris", "London"]
    assert tokenizer.encode(" London") in prepared.params.bad_words_token_ids
    assert tokenizer.encode("🤗") in prepared.params.bad_words_token_ids
    assert params.bad_words_token_ids is None


def test_without_a_tokenizer():
    assert process([1, 2], tokenizer=None).prompt is None
    for prompt, params in (
        ("abc", None),
        ([1], SamplingParams(stop="x")),
        ([1], SamplingParams(bad_words=["x"])),
    ):
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            process(prompt, params, tokenizer=None)


def test_children_of_n():
    prepared = process("abc", SamplingParams(n=3, seed=7), request_id="mine", priority=-2, arrival_s=5.0)
    first, *others = prepared.engine_requests
    assert prepared.request_id == "mine"
    assert [r.spec.seed for r in prepared.engine_requests] == [7, 8, 9]
    assert first.sharing.leader_id == ""
    assert {r.sharing.leader_id for r in others} == {first.request_id}
    assert len({r.request_id for r in prepared.engine_requests}) == 3
    assert "mine" not in first.request_id
    assert {(r.standing.priority, r.standing.arrival_s) for r in prepared.engine_requests} == {(-2, 5.0)}


def test_ids_are_never_reused():
    ours = processor()
    ids = {ours.process("a", request_id="same").engine_requests[0].request_id for _ in range(100)}
    assert len(ids) == 100
    assert len({ours.process("a").request_id for _ in range(100)}) == 100


def test_seeds():
    def seeds(**model):
        ours = processor(model=model)
        return [ours.process("a").engine_requests[0].spec.seed for _ in range(3)]

    assert seeds(seed=5) == seeds(seed=5) != seeds(seed=6)
    assert seeds() != seeds()
    assert len(set(seeds(seed=5))) == 3
    assert all(0 <= seed < 2**63 for seed in seeds() + seeds(seed=5))
    for seed in (-(2**63), -5, 0, 2**63 - 1):
        requests = process("a", SamplingParams(seed=seed, n=2)).engine_requests
        assert [r.spec.seed for r in requests] == [seed % 2**63, (seed + 1) % 2**63]


@pytest.mark.parametrize("priority", [1.5, "1", True, 2**31])
def test_bad_priority(priority):
    with pytest.raises(RequestError, match="priority"):
        process(priority=priority)


def test_end_of_text_ids():
    def eos(params=None, **options):
        return process("a", params, config_options=options).engine_requests[0].limits.eos_token_ids

    assert eos() == [TOKENIZER.EOS]
    assert eos(generation={"eos_token_id": [3, 4]}) == [3, 4, TOKENIZER.EOS]
    assert eos(generation={"eos_token_id": 9999}) == [TOKENIZER.EOS]
    assert eos(checkpoint={"eos_token_id": 5}) == [5, TOKENIZER.EOS]
    assert eos(generation={"eos_token_id": 3}, model={"override_generation_config": {"eos_token_id": 6}}) == [
        6,
        TOKENIZER.EOS,
    ]
    assert eos(SamplingParams(ignore_eos=True)) == []


def test_default_sampling_params():
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 40, "do_sample": True}
    defaults = processor(generation=generation).get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.max_tokens) == (0.6, 20, 0.9, 40)
    model = {"override_generation_config": {"temperature": 0.1, "top_k": None}}
    overridden = processor(generation=generation, model=model).get_default_sampling_params()
    assert (overridden.temperature, overridden.top_k) == (0.1, 0)
    ours = processor(
        generation=generation, model={"generation_config": "octavo"}
    ).get_default_sampling_params()
    assert ours == SamplingParams()
    assert process("a", config_options={"generation": generation}).params.temperature == 0.6


def test_the_users_parameters_stay_as_they_are():
    params = SamplingParams(logprobs=2, stop=["a"], bad_words=["b"], seed=None, max_tokens=None)
    before = msgspec.msgpack.encode(params)
    prepared = process("abc", params)
    assert msgspec.msgpack.encode(params) == before
    assert prepared.params is not params


def test_values_changed_after_construction_are_checked_again():
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(RequestError, match="temperature"):
        process("abc", params)


def test_arrival_is_now_on_the_monotonic_clock():
    before = time.monotonic()
    assert before <= process("a").arrival_s <= time.monotonic()


def test_engine_requests_cross_the_door():
    (request,) = process(
        "abc", SamplingParams(bad_words=["x"], logit_bias={1: 2.0}, stop="q")
    ).engine_requests
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request)) == request
