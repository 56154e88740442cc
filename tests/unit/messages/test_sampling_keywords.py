"""SamplingParams beyond the draw: scored tokens, repetition, other names, keywords that are refused."""

import copy

import msgspec
import pytest

from octavo.base.errors import RequestError, Unsupported
from octavo.messages.sampling import MAX_LOGPROB_TOKEN_IDS, RepetitionDetectionParams, SamplingParams

TOO_MANY = list(range(MAX_LOGPROB_TOKEN_IDS + 1))


@pytest.mark.parametrize(
    "values",
    [
        {"logprob_token_ids": TOO_MANY[1:]},
        {"logprob_token_ids": [7], "logprobs": 1},
        {"prompt_logprob_token_ids": [3, 3, 1]},
        {"prompt_logprob_token_ids": [[3], [1, 2]], "prompt_logprob_start": 10**9},
        {"prompt_logprob_token_ids": [[], [1, 2]]},
        {"flat_logprobs": True},
        {"stream_interval": 1},
        {"stream_interval": 10**9},
        {"repetition_detection": RepetitionDetectionParams(20, 3, 4)},
        {"thinking_token_budget": -1},
        {"thinking_token_budget": 0, "thinking_tag_ids": [[], [1, 2]]},
        {"stop_strings": ["a", "b"]},
    ],
    ids=str,
)
def test_accepted_and_unchanged_by_a_message(values):
    params = SamplingParams(**values)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert params.clone() == copy.deepcopy(params) == params


@pytest.mark.parametrize(
    ("values", "name", "text"),
    [
        ({"logprob_token_ids": []}, "logprob_token_ids", "must hold 1 to 128 ids, got 0."),
        ({"logprob_token_ids": TOO_MANY}, "logprob_token_ids", "must hold 1 to 128 ids, got 129."),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids", "ids of at least 0, got -1."),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, "logprobs", r"logprob_token_ids \(2\), got 3."),
        ({"logprob_token_ids": [1, 2], "logprobs": -1}, "logprobs", r"logprob_token_ids \(2\), got -1."),
        ({"prompt_logprob_token_ids": []}, "prompt_logprob_token_ids", "must hold 1 to 128 ids"),
        ({"prompt_logprob_token_ids": [[1] * 129]}, "prompt_logprob_token_ids", "0 too, got 129."),
        ({"prompt_logprob_token_ids": [[1], 2]}, "prompt_logprob_token_ids", "list of token ids, got 2."),
        ({"prompt_logprob_token_ids": [1, [2]]}, "prompt_logprob_token_ids", "only integers"),
        ({"prompt_logprob_token_ids": "ab"}, "prompt_logprob_token_ids", "a list of token ids"),
        ({"prompt_logprob_start": 1}, "prompt_logprob_start", "belongs to prompt_logprob_token_ids"),
        (
            {"prompt_logprob_token_ids": [1], "prompt_logprob_start": -1},
            "prompt_logprob_start",
            "must be at least 0, got -1.",
        ),
        ({"flat_logprobs": 1}, "flat_logprobs", "must be True or False, got 1."),
        ({"stream_interval": 0}, "stream_interval", "stream_interval must be at least 1, got 0."),
        ({"stream_interval": 1.0}, "stream_interval", "must be an integer, got 1.0."),
        ({"repetition_detection": {"min_count": 2}}, "repetition_detection", "RepetitionDetectionParams"),
        ({"thinking_token_budget": -2}, "thinking_token_budget", "must be non-negative or -1, got -2."),
        ({"thinking_token_budget": True}, "thinking_token_budget", "must be an integer, got True."),
        ({"logits_processors": [1]}, "logits_processors", r"a list of functions, got \[1\]."),
        ({"logits_processors": print}, "logits_processors", "a list of functions"),
        ({"stop": "a", "stop_strings": ["b"]}, "stop_strings", "two names of one thing"),
        ({"stop_strings": ["a", ""]}, "stop_strings", "stop_strings cannot contain an empty string."),
        ({"stop_strings": [1]}, "stop_strings", "stop_strings must be a list of strings, got"),
    ],
    ids=str,
)
def test_refused_with_text_and_name(values, name, text):
    with pytest.raises(RequestError, match=text) as caught:
        SamplingParams(**values)
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    ("keyword", "value", "error", "remedy"),
    [
        ("top_ema_p", 0.5, RequestError, "top_p, min_p or top_k"),
        ("top_ema_d", 1, RequestError, "top_p, min_p or top_k"),
        ("watermarking", {}, Unsupported, "not there yet"),
        ("trace_decode_token_ids", [1], Unsupported, "leave it None"),
        ("skip_clone", "yes", Unsupported, "True or False"),
        ("multiple_stop_sequences", "yes", Unsupported, "True or False"),
    ],
)
def test_known_keywords_that_are_not_served(keyword, value, error, remedy):
    with pytest.raises(error, match=rf"(?s){keyword} .*{remedy}"):
        SamplingParams(**{keyword: value})
    assert SamplingParams(**{keyword: None}) == SamplingParams()


EARLY_DEFAULTS = {
    "n": 1,
    "best_of": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "top_ema_p": 0.0,
    "top_ema_d": 0,
    "seed": None,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "stop": None,
    "stop_strings": None,
    "stop_token_ids": None,
    "multiple_stop_sequences": False,
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "logits_processors": None,
    "logit_bias": None,
    "forbidden_token_ids": None,
}
"""What articles about vLLM list."""


@pytest.mark.parametrize("name", EARLY_DEFAULTS)
def test_documented_defaults_ask_for_nothing(name):
    wanted = SamplingParams(top_k=-1) if name == "top_k" else SamplingParams()
    assert SamplingParams(**{name: EARLY_DEFAULTS[name]}) == wanted
    assert SamplingParams(**EARLY_DEFAULTS) == SamplingParams(top_k=-1)


def test_neutral_values_pass_and_unknown_keywords_do_not():
    assert SamplingParams(skip_clone=True, routed_experts_prompt_start=0, top_k=3) == SamplingParams(top_k=3)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)


def test_two_names_of_the_stop_strings():
    assert SamplingParams(stop_strings=["a"]) == SamplingParams(stop="a") == SamplingParams(stop=["a"])
    assert SamplingParams(stop="a", stop_strings=["a"]).stop_strings == ["a"]
    assert SamplingParams().stop_strings == []
    params = SamplingParams(stop=["a"])
    params.stop = ["b"]
    assert params.clone().stop_strings == ["b"]


def test_scored_tokens_set_the_number_and_keep_away_from_the_prefix_cache():
    assert SamplingParams(logprob_token_ids=[5, 2, 5]).logprobs == 2
    assert SamplingParams(logprob_token_ids=[5, 2, 5]).logprob_token_ids == [5, 2]
    assert SamplingParams(prompt_logprob_token_ids=[1]).skip_reading_prefix_cache is True
    assert SamplingParams(prompt_logprob_token_ids=[1, 2]).prompt_candidates == [[1, 2]]
    assert SamplingParams(prompt_logprob_token_ids=[[1], [2]]).prompt_candidates == [[1], [2]]
    assert SamplingParams().prompt_candidates == []


def test_from_optional():
    given = {"n": None, "temperature": None, "top_p": 0.5, "stop": None, "logit_bias": {"3": 200}}
    assert SamplingParams.from_optional(**given) == SamplingParams(top_p=0.5, logit_bias={3: 100.0})
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional() == SamplingParams()
    with pytest.raises(RequestError, match="top_p"):
        SamplingParams.from_optional(top_p=2)


@pytest.mark.parametrize("values", [(0, 0, 0), (0, 0, 9), (5, 0, 2), (5, 5, 10**6)])
def test_repetition_detection_bounds(values):
    assert RepetitionDetectionParams(*values).max_pattern_size == values[0]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((2, 3, 2), "min_pattern_size <= max_pattern_size"),
        ((-1, 0, 2), "max_pattern_size must be at least 0, got -1."),
        ((2, 0, 1), "min_count must be >= 2"),
        ((2, 1.0, 2), "min_pattern_size must be an integer, got 1.0."),
    ],
)
def test_repetition_detection_refused(values, text):
    with pytest.raises(RequestError, match=text):
        RepetitionDetectionParams(*values)
