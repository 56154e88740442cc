"""Lengths of time as people write them."""

import math

import pytest

from octavo.base.duration import seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(5, 5), (1.5, 1.5), ("90", 90), ("10m", 600), ("1h30m", 5400), ("250ms", 0.25), ("1d", 86400), ("0", 0)],
)
def test_seconds(text, seconds):
    assert seconds_of(text) == pytest.approx(seconds)


@pytest.mark.parametrize("value", [-1, "-1", "-1s", "-5m"])
def test_negative_is_for_ever(value):
    assert math.isinf(seconds_of(value))


@pytest.mark.parametrize("value", ["", "soon", "5 minutes", "1m x", True, None, [], float("nan"), "nan"])
def test_what_is_none(value):
    with pytest.raises(ValueError, match=r"could not convert|not a length of time"):
        seconds_of(value)
