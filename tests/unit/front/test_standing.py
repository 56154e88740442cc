"""Priority, tenant and deadline, from the user's words to the engine request."""

import pytest

from octavo.base.errors import RequestError
from octavo.frontend.input_processor import InputProcessor
from octavo.messages.request import Standing
from octavo.messages.sampling import SamplingParams
from tests.fakes import ByteTokenizer, fake_config


def process(params=None, **options):
    return InputProcessor(fake_config(), ByteTokenizer()).process([1, 2, 3], params, **options)


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
    ("options", "text"),
    [
        ({"priority": 2**31}, "priority must be an integer of 32 bits, got 2147483648."),
        ({"tenant": 5}, "tenant must be a printable string, got 5."),
        ({"tenant": "a\ud800"}, "tenant must be a printable string"),
        ({"deadline_s": 0}, "deadline_s must be greater than zero, got 0."),
        ({"deadline_s": float("nan")}, "deadline_s must be a finite number, got nan."),
    ],
)
def test_wrong_values(options, text):
    with pytest.raises(RequestError) as refusal:
        process(**options)
    assert text in str(refusal.value) and refusal.value.parameter == next(iter(options))


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), "soon", True])
def test_wrong_timeouts(timeout_s):
    with pytest.raises(RequestError, match=r"timeout_s must be (greater than zero|a finite number)"):
        SamplingParams(timeout_s=timeout_s)
    assert SamplingParams(timeout_s=2).timeout_s == 2.0
