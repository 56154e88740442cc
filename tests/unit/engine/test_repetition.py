"""The end by repetition, against the definition."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.scheduler.repetition import RepetitionDetector
from octavo.engine.scheduler.request import Request
from octavo.engine.scheduler.stops import Stop, find_stop
from octavo.messages.request import FinishReason
from octavo.messages.sampling import RepetitionDetectionParams, SamplingParams
from tests.fakes import fake_request


def ends_in_a_circle(tokens, params):
    """The definition: the last size * min_count tokens are min_count times the last size."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        end = tokens[-size * params.min_count :]
        if len(end) == size * params.min_count and end == tokens[-size:] * params.min_count:
            return True
    return False


@given(
    st.lists(st.integers(0, 2), max_size=80),
    st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(2, 4)).filter(lambda v: v[1] <= v[0]),
)
def test_equals_the_definition_at_every_token(tokens, values):
    params = RepetitionDetectionParams(*values)
    detector = RepetitionDetector(params)
    for count, token in enumerate(tokens, 1):
        assert detector.feed(token) == ends_in_a_circle(tokens[:count], params)


def test_cost_goes_with_what_repeats_not_with_the_longest_pattern():
    detector = RepetitionDetector(RepetitionDetectionParams(10**9, 1, 2))
    start = time.perf_counter()
    assert not any(detector.feed(token) for token in range(100_000))
    assert time.perf_counter() - start < 5


def request(max_tokens=100, **params):
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request.create(fake_request("r", [1, 2], max_tokens, sampling=sampling), 0, 1000, 4)


def feed(entry, tokens):
    for count, token in enumerate(tokens, 1):
        entry.token_ids.append(token)
        if (stop := find_stop(entry)) is not None:
            return count, stop
    return None


REPETITION = Stop(FinishReason.REPETITION, "repetition_detected")


def test_the_prompt_does_not_count():
    detection = RepetitionDetectionParams(3, 2, 2)
    assert feed(request(repetition_detection=detection), [1, 2, 1, 2, 7]) == (4, REPETITION)
    assert feed(request(repetition_detection=detection), [1, 2, 9]) is None


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 3), (3, 3), (6, 6)])
def test_min_tokens_holds_it_back(min_tokens, expected):
    entry = request(min_tokens=min_tokens, repetition_detection=RepetitionDetectionParams(1, 1, 3))
    assert feed(entry, [5] * 9) == (expected, REPETITION)


def test_other_ends_come_first():
    detection = RepetitionDetectionParams(1, 1, 3)
    assert (
        feed(request(max_tokens=3, repetition_detection=detection), [5] * 9)[1].reason is FinishReason.LENGTH
    )
    stopped = feed(request(stop_token_ids=[5], repetition_detection=detection), [5] * 9)
    assert stopped == (1, Stop(FinishReason.STOP, 5))


def test_none_and_zero_detect_nothing():
    assert feed(request(), [5] * 50) is None
    assert feed(request(repetition_detection=RepetitionDetectionParams()), [5] * 50) is None
