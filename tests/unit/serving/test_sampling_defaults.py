"""What a request leaves open, and the model recommends to be greedy."""

import pytest

from octavo.base.errors import RequestError
from octavo.serving.openai.protocol import CompletionRequest
from octavo.serving.openai.sampling import sampling_params


@pytest.mark.parametrize(
    ("fields", "recommended", "temperature"),
    [
        ({}, {"temperature": 0.0}, 0.0),
        ({"n": 2}, {"temperature": 0.0}, 1.0),
        ({"best_of": 2}, {"temperature": 0.0}, 1.0),
        ({"n": 2}, {"temperature": 0.6}, 0.6),
        ({"n": 2}, {}, 1.0),
        ({"n": 2, "use_beam_search": True}, {"temperature": 0.6}, 0.0),
    ],
)
def test_several_answers_are_sampled(fields, recommended, temperature):
    body = CompletionRequest(model="m", prompt="Hi", **fields)
    assert sampling_params(body, recommended).temperature == temperature


def test_a_temperature_of_zero_that_was_asked_for_is_kept():
    body = CompletionRequest(model="m", prompt="Hi", n=2, temperature=0.0)
    with pytest.raises(RequestError, match="must be 1 when using greedy"):
        sampling_params(body, {"temperature": 0.0})
