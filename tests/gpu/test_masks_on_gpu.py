"""Grammars with two steps in flight on a GPU: masks that follow their step change no token (float32)."""

import pytest

from tests.integration.test_masks_in_flight import flags, run

__all__ = ["flags", "run"]
pytestmark = pytest.mark.gpu


def test_masks_may_follow(tiny_model, run, flags):
    expected = run(tiny_model, steps_in_flight=1)
    assert not any(flags)
    assert run(tiny_model, steps_in_flight=2, enforce_eager=True) == expected
    assert run(tiny_model, steps_in_flight=2) == expected
    assert sum(flags) > 20
