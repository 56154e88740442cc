"""Grammars with several steps in flight, in random traffic: everybody gets the tokens that it gets alone.

Requests with and without a form arrive, end by themselves or are aborted, are chunked and preempted, while up
to four steps are under way. The fake runner refuses steps and masks in a wrong order.
"""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.messages.request import FinishReason
from tests.structured import ByteEngine, text

FORMS = [r"\d{3}-[a-f]{2,9}", "(ab)+", "[a-z ]*x?", "yes|no", ""]

REQUESTS = st.fixed_dictionaries({
    "form": st.integers(0, len(FORMS) - 1),
    "seed": st.integers(0, 3),
    "length": st.integers(1, 12),
    "max_tokens": st.sampled_from([1, 2, 9, 25]),
    "arrival": st.integers(0, 12),
    "abort": st.sampled_from([None, None, None, 1, 2, 5]),
})  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(tokens, finish reason) of a request that nobody else is beside; computed once."""
    engine, known = ByteEngine(tmp_path_factory.mktemp("alone"), enable_prefix_caching=False), {}

    def run(asked):
        key = tuple(asked[name] for name in ("form", "seed", "length", "max_tokens"))
        if key not in known:
            [(tokens, last)] = engine.run([make(engine, "r", asked)]).values()
            known[key] = tokens, last.finish_reason
        return known[key]

    return run


def make(engine, name, asked):
    form = {"regex": FORMS[asked["form"]]} if FORMS[asked["form"]] else {}
    return engine.request(name, asked["max_tokens"], asked["seed"], [7] * asked["length"], **form)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(REQUESTS, min_size=1, max_size=8),
    steps_in_flight=st.integers(1, 4),
    num_blocks=st.sampled_from([12, 16, 400]),
    budget=st.sampled_from([5, 32]),
)
def test_tokens_do_not_depend_on_what_is_in_flight(
    tmp_path, alone, asked, steps_in_flight, num_blocks, budget
):
    engine = ByteEngine(
        tmp_path,
        steps_in_flight=steps_in_flight,
        num_blocks=num_blocks,
        max_model_len=40,
        max_num_batched_tokens=budget,
        max_num_seqs=5,
    )
    tokens = {index: [] for index in range(len(asked))}
    ends, step = {}, 0
    while engine.core.has_work() or step <= max(each["arrival"] for each in asked):
        for index, each in enumerate(asked):
            if each["arrival"] == step:
                engine.core.add(make(engine, str(index), each))
            if each["abort"] is not None and each["arrival"] + each["abort"] == step:
                engine.core.abort([str(index)])
        for output in engine.core.step().outputs:
            tokens[int(output.request_id)] += output.new_token_ids
            ends[int(output.request_id)] = output.finish_reason
        step += 1
    for index, each in enumerate(asked):
        expected, reason = alone(each)
        assert tokens[index] == expected[: len(tokens[index])]
        assert each["abort"] is not None or (tokens[index], ends[index]) == (expected, reason)
        if FORMS[each["form"]] and ends.get(index) is FinishReason.STOP:
            assert re.fullmatch(FORMS[each["form"]], text(tokens[index]))
    assert engine.core.scheduler.stats().num_blocks_used == 0
    assert not engine.executor._late_masks
