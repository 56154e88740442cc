"""Grammars with two steps in flight on a GPU: masks that follow their step change no token (float32)."""

import pytest

from tests.integration.test_masks_in_flight import flags, run

__all__ = ["flags", "run"]
pytestmark = pytest.mark.gpu


def test_masks_may_follow(tiny_model, run, flags):
    expected = run(tiny_model, steps_in_flight=1)
    assert not any(flags)
    assert_same(run(tiny_model, steps_in_flight=2, enforce_eager=True), expected)
    assert_same(run(tiny_model, steps_in_flight=2), expected)
    assert sum(flags) > 20


def assert_same(results, expected):
    """Tokens and ends; logprobs as nearly as kernels for other numbers of rows compute them."""
    for request_id, (tokens, logprobs, reason) in expected.items():
        ours = results[request_id]
        assert (ours[0], ours[2]) == (tokens, reason)
        for entry, wanted in zip(ours[1], logprobs, strict=True):
            assert entry.token_ids == wanted.token_ids
            assert entry.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
