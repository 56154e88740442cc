"""How many may wait: counts, refusals, and places that are given back."""

import dataclasses
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import Overloaded
from octavo.config import FrontConfig
from octavo.frontend.admission.admission import Admission
from octavo.frontend.observe.engine_metrics import EngineMetrics
from tests.fakes import fake_config


def make(metrics=None, **front):
    config = dataclasses.replace(fake_config(max_num_seqs=4), front=FrontConfig(**front))
    return Admission(config, metrics or EngineMetrics())


def test_seats_and_queue():
    admission = make(max_num_queued_reqs=3)
    tickets = [admission.reserve(1, "a") for _ in range(5)]
    with pytest.raises(Overloaded, match="1 sequences wait, max_num_queued_reqs=3"):
        admission.reserve(3, "a")
    tickets.append(admission.reserve(2, "a"))
    with pytest.raises(Overloaded):
        admission.check()
    tickets[0].release()
    tickets[0].release()
    admission.check(1)
    with pytest.raises(Overloaded):
        admission.check(2)


def test_prompt_tokens_that_wait():
    admission = make(max_num_queued_tokens=100)
    first = admission.reserve(1, "x" * 200)
    assert admission.num_waiting_tokens == 51, "an estimate, until they are counted"
    first.set_prompt(80)
    with pytest.raises(Overloaded, match="80 prompt tokens wait, max_num_queued_tokens=100"):
        admission.reserve(1, [1] * 21)
    second = admission.reserve(1, {"prompt_token_ids": [1] * 20})
    first.set_prompt(0)
    second.release()
    assert admission.num_waiting_tokens == 0
    admission.reserve(1, [1] * 1000)


def test_no_bounds():
    admission = make()
    for _ in range(1000):
        admission.reserve(16, [1] * 1000)


@pytest.mark.parametrize(("mean_s", "wait_s"), [(0.0, 1.0), (6.0, 9.0), (1000.0, 60.0)])
def test_when_to_try_again(mean_s, wait_s):
    metrics = EngineMetrics()
    if mean_s:
        metrics.request_latency.observe(mean_s)
    admission = make(metrics, max_num_queued_reqs=2)
    for _ in range(6):
        admission.reserve(1, "a")
    with pytest.raises(Overloaded) as refused:
        admission.check()
    assert refused.value.retry_after_s == pytest.approx(wait_s, abs=0.5)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 60), st.integers(0, 9)), max_size=40))
def test_places_taken_are_places_given_back(requests):
    admission = make(max_num_queued_reqs=6, max_num_queued_tokens=120)
    tickets = []
    for num_sequences, num_tokens, leaving in requests:
        with suppress(Overloaded):
            tickets.append(admission.reserve(num_sequences, [0] * num_tokens))
        assert admission.num_sequences <= 4 + 6
        assert admission.num_waiting_tokens <= 120
        if tickets and leaving % 2:
            tickets.pop(leaving % len(tickets)).release()
    for ticket in tickets:
        ticket.release()
    assert (admission.num_sequences, admission.num_waiting_tokens) == (0, 0)


@pytest.mark.parametrize("prompt", [None, 7, object(), {}, {"prompt": None}, {"prompt_token_ids": 5}])
def test_prompts_that_will_be_refused_are_let_through_to_be_refused(prompt):
    make(max_num_queued_tokens=10).reserve(1, prompt)
