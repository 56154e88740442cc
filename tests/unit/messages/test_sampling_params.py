"""SamplingParams: defaults, every bound, wrong types, and the way through a message."""

import math

import msgspec
import numpy as np
import pytest

from octavo.base.errors import RequestError
from octavo.messages.sampling import MAX_N, RequestOutputKind, SamplingParams

NAN, INF, HUGE = math.nan, math.inf, 10**400

ACCEPTED = [
    {"n": 1},
    {"n": MAX_N},
    {"presence_penalty": -2},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"frequency_penalty": 2},
    {"repetition_penalty": 1e-6},
    {"repetition_penalty": 100.0},
    {"temperature": 0},
    {"temperature": 1e-30},
    {"temperature": 2},
    {"top_p": 1e-9},
    {"top_p": 1},
    {"top_k": -1},
    {"top_k": 10**6},
    {"min_p": 0},
    {"min_p": 1.0},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"stop": []},
    {"stop": ("a", "b")},
    {"max_tokens": None},
    {"max_tokens": 1},
    {"max_tokens": 7, "min_tokens": 7},
    {"max_tokens": None, "min_tokens": 10**9},
    {"logprobs": 0},
    {"logprobs": -1},
    {"prompt_logprobs": -1},
    {"allowed_token_ids": range(5)},
    {"stop_token_ids": {3}},
    {"forbidden_token_ids": []},
    {"logit_bias": {}},
    {"extra_args": {"a": [1, {"b": 2**64 - 1}]}},
    {"output_kind": 1},
    {"detokenize": False},
]

REFUSED = [
    ("n", 0, "n must be at least 1, got 0."),
    ("n", MAX_N + 1, "n must be at most 16384, got 16385."),
    ("n", 2.0, "n must be an integer, got 2.0."),
    ("n", True, "n must be an integer, got True."),
    ("n", "2", "n must be an integer, got '2'."),
    ("n", None, "n must be an integer, got None."),
    ("presence_penalty", 2.01, "presence_penalty must be in [-2, 2], got 2.01."),
    ("presence_penalty", -2.01, "presence_penalty must be in [-2, 2], got -2.01."),
    ("frequency_penalty", 3, "frequency_penalty must be in [-2, 2], got 3.0."),
    ("repetition_penalty", 0, "repetition_penalty must be greater than zero, got 0.0."),
    ("repetition_penalty", -1, "repetition_penalty must be greater than zero, got -1.0."),
    ("temperature", -0.1, "temperature must be non-negative, got -0.1."),
    ("temperature", 2.1, "temperature must be in [0, 2], got 2.1."),
    ("temperature", 1e308, "temperature must be in [0, 2], got 1e+308."),
    ("top_p", 0, "top_p must be in (0, 1], got 0.0."),
    ("top_p", 1.1, "top_p must be in (0, 1], got 1.1."),
    ("top_k", -2, "top_k must be 0 (disable), or at least 1, got -2."),
    ("top_k", 1.5, "top_k must be an integer, got 1.5."),
    ("top_k", True, "top_k must be an integer, got True."),
    ("min_p", -0.1, "min_p must be in [0, 1], got -0.1."),
    ("min_p", 1.1, "min_p must be in [0, 1], got 1.1."),
    ("seed", 2**63, "seed must be less than 2**63, got 9223372036854775808."),
    ("seed", -(2**63) - 1, "seed must be at least -9223372036854775808, got -9223372036854775809."),
    ("seed", 1.0, "seed must be an integer, got 1.0."),
    ("stop", "", "stop cannot contain an empty string."),
    ("stop", ["a", ""], "stop cannot contain an empty string."),
    ("stop", [1], "stop must be a list of strings, got [1]."),
    ("stop", 1, "stop must be a list of strings, got 1."),
    ("stop", ["\ud800"], "stop holds half of a surrogate pair, which is no text: ['\\ud800']."),
    ("stop_token_ids", ["1"], "stop_token_ids must contain only integers, got ['1']."),
    ("stop_token_ids", [True], "stop_token_ids must contain only integers, got [True]."),
    ("stop_token_ids", [-1], "stop_token_ids must be ids of at least 0, got -1."),
    ("stop_token_ids", "12", "stop_token_ids must be a list of token ids, got '12'."),
    ("stop_token_ids", 12, "stop_token_ids must be a list of token ids, got 12."),
    ("bad_words", [""], "bad_words cannot contain an empty string. Got bad_words=['']"),
    ("bad_words", "word", "bad_words must be a list of strings, got 'word'."),
    ("max_tokens", 0, "max_tokens must be at least 1, got 0."),
    ("max_tokens", 10**30, f"max_tokens must be less than 2**63, got {10**30}."),
    ("max_tokens", "5", "max_tokens must be an integer, got '5'."),
    ("min_tokens", -1, "min_tokens must be greater than or equal to 0, got -1."),
    ("min_tokens", 17, "min_tokens must be less than or equal to max_tokens=16, got 17."),
    ("logprobs", -2, "logprobs must be non-negative or -1, got -2."),
    ("logprobs", 1.0, "logprobs must be an integer, got 1.0."),
    ("prompt_logprobs", -2, "prompt_logprobs must be non-negative or -1, got -2."),
    ("allowed_token_ids", [], "allowed_token_ids is not None and empty!"),
    ("forbidden_token_ids", [2**63], "forbidden_token_ids must be less than 2**63, got 9223372036854775808."),
    (
        "logit_bias",
        {"a": 1, "1.5": 1, INF: 1},
        "logit_bias contains key(s) that cannot be converted to integer token IDs: ['a', '1.5', inf]",
    ),
    ("logit_bias", {-1: 1}, "logit_bias must be about token ids of at least 0, got -1."),
    ("logit_bias", {1: NAN}, "logit_bias must be a finite number, got nan."),
    ("logit_bias", {1: "x"}, "logit_bias must be a finite number, got 'x'."),
    ("logit_bias", [1], "logit_bias must map token ids to numbers, got [1]."),
    ("ignore_eos", "yes", "ignore_eos must be True or False, got 'yes'."),
    ("detokenize", 1, "detokenize must be True or False, got 1."),
    (
        "output_kind",
        3,
        "output_kind must be one of CUMULATIVE (0), DELTA (1), FINAL_ONLY (2), got 3.",
    ),
    (
        "extra_args",
        {"a": 2**64},
        "extra_args must hold plain values, and integers of 64 bits at most.",
    ),
]

FLOATS = ["presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p"]


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.presence_penalty, params.frequency_penalty) == (1, 0.0, 0.0)
    assert (params.repetition_penalty, params.temperature, params.top_p) == (1.0, 1.0, 1.0)
    assert (params.top_k, params.min_p, params.seed, params.max_tokens, params.min_tokens) == (
        0,
        0,
        None,
        16,
        0,
    )
    assert (params.logprobs, params.prompt_logprobs, params.detokenize) == (None, None, True)
    assert params.skip_special_tokens and params.spaces_between_special_tokens
    assert not params.include_stop_str_in_output and not params.ignore_eos
    assert params.output_kind is RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_accepted_and_unchanged_by_a_message(values):
    params = SamplingParams(**values)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert params.clone() == params


@pytest.mark.parametrize(("name", "value", "text"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_with_text_and_name(name, value, text):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == text
    assert caught.value.parameter == name


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "value", [NAN, INF, -INF, HUGE, True, "0.5", None, [1.0], 1j], ids=lambda v: str(v)[:9]
)
def test_only_finite_numbers(name, value):
    with pytest.raises(RequestError, match=f"{name} must be a finite number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "values", [{"temperature": 3.0}, {"top_k": -5}, {"stop": [""]}, {"n": "many"}], ids=str
)
def test_a_message_is_checked_too(values):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(values), type=SamplingParams)


def test_greedy_needs_one_sequence_and_ignores_truncation():
    params = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1)
    assert params.greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    with pytest.raises(RequestError, match=r"n must be 1 when using greedy sampling, got 2\."):
        SamplingParams(temperature=0, n=2)


def test_low_temperature_is_raised(caplog):
    with caplog.at_level("WARNING", logger="octavo"):
        assert SamplingParams(temperature=0.001).temperature == 0.01
    assert "temperature 0.001 is raised to 0.01" in caplog.text
    assert SamplingParams(temperature=0.01).temperature == 0.01


def test_what_is_given_in_another_form_is_put_straight():
    params = SamplingParams(
        stop="end",
        seed=-1,
        logprobs=True,
        prompt_logprobs=True,
        stop_token_ids=(3, 1, 3),
        bad_words=["b", "a", "b"],
        logit_bias={"5": 1000, 6: -1000.0},
        top_k=np.int64(5),
        temperature=np.float32(0.5),
    )
    assert (params.stop, params.stop_strings, params.seed) == (["end"], ["end"], None)
    assert (params.logprobs, params.prompt_logprobs, params.skip_reading_prefix_cache) == (1, 1, True)
    assert (params.stop_token_ids, params.bad_words) == ([3, 1], ["b", "a"])
    assert params.logit_bias == {5: 100.0, 6: -100.0}
    assert (type(params.top_k), type(params.temperature)) == (int, float)
    assert SamplingParams(logprobs=False).logprobs is None


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="only supported when detokenize is True"):
        SamplingParams(stop="a", detokenize=False)


def test_a_clone_keeps_what_it_was_made_from():
    params = SamplingParams(stop=["a"], bad_words_token_ids=[[1, 1], []])
    clone = params.clone()
    clone.seed = 5
    assert params.seed is None
    assert clone.bad_words_token_ids == [[1, 1]]
