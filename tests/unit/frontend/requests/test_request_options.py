"""The keywords of a request: from the user's words to the engine request."""

from functools import partial

import pytest

from octavo.base.errors import RequestError
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.frontend.requests.options import RequestOptions
from octavo.messages.request import Standing
from octavo.messages.sampling import SamplingParams
from tests.fakes import ByteTokenizer, fake_config, options


def process(params=None, **keywords):
    return InputProcessor(fake_config(), ByteTokenizer()).process([1, 2, 3], params, options(**keywords))


def test_every_sequence_stands_where_its_request_does():
    prepared = process(
        SamplingParams(n=2, timeout_s=3), arrival_s=100.0, priority=-4, tenant="team a", deadline_s=7
    )
    for request in prepared.engine_requests:
        assert request.standing == Standing(100.0, -4, "team a", 107.0)
        assert request.limits.timeout_s == 3.0


def test_nothing_said():
    [request] = process(arrival_s=5.0).engine_requests
    assert request.standing == Standing(5.0, 0, "", None)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"priority": 2**31}, "priority must be an integer of 32 bits, got 2147483648."),
        ({"tenant": 5}, "tenant must be a printable string, got 5."),
        ({"tenant": "a\ud800"}, "tenant must be a printable string"),
        ({"deadline_s": 0}, "deadline_s must be greater than zero, got 0."),
        ({"deadline_s": float("nan")}, "deadline_s must be a finite number, got nan."),
    ],
)
def test_wrong_values(keywords, text):
    with pytest.raises(RequestError) as refusal:
        process(**keywords)
    assert text in str(refusal.value) and refusal.value.parameter == next(iter(keywords))


def test_unknown_keywords_are_named_and_the_known_ones_told():
    says = r"unexpected keyword argument 'prioritty': a request takes data_parallel_rank, .* tenant,"
    for parse in (RequestOptions.parse, partial(RequestOptions.parse_each, count=0)):
        with pytest.raises(TypeError, match=says):
            parse({"prioritty": 1})


def test_each_prompt_gets_its_own():
    shared = {"tokenization_kwargs": {"add_special_tokens": False}, "trace_headers": {"traceparent": "x"}}
    first, second = RequestOptions.parse_each({"priority": [1, 2], "tenant": iter("ab"), **shared}, 2)
    assert (first.priority, first.tenant, first.deadline_s) == (1, "a", None)
    assert second == RequestOptions.parse({"priority": 2, "tenant": "b", **shared})
    with pytest.raises(RequestError, match=r"lengths of prompts \(3\) and priority \(2\)"):
        RequestOptions.parse_each({"priority": [1, 2]}, 3)
    with pytest.raises(RequestError, match="priority must be an integer of 32 bits, got '2'"):
        RequestOptions.parse_each({"priority": [1, "2"]}, 2)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), "soon", True])
def test_wrong_timeouts(timeout_s):
    with pytest.raises(RequestError, match=r"timeout_s must be (greater than zero|a finite number)"):
        SamplingParams(timeout_s=timeout_s)
    assert SamplingParams(timeout_s=2).timeout_s == 2.0


def test_one_value_for_all_prompts():
    every = RequestOptions.parse_each({"priority": 1, "tenant": "team", "deadline_s": 2.0}, 3)
    assert [(o.priority, o.tenant, o.deadline_s) for o in every] == [(1, "team", 2.0)] * 3
    assert [o.priority for o in RequestOptions.parse_each({"priority": None}, 2)] == [0, 0]
    with pytest.raises(RequestError, match="priority must be an integer of 32 bits, got 1"):
        RequestOptions.parse_each({"priority": 1.5}, 2)
