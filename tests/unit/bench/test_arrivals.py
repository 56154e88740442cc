"""When requests are sent: rates, bursts, ramps."""

import numpy as np
import pytest

from octavo.base.errors import ConfigError
from octavo.bench.arrivals import RampUp, check_ramp_up, send_times


def times(count, rate, burstiness=1.0, ramp=None):
    return np.array(send_times(count, rate, burstiness, np.random.default_rng(0), ramp))


def test_a_rate_without_end_sends_all_at_once():
    assert not times(5, float("inf")).any()


def test_all_are_sent_in_the_time_that_the_rate_says():
    for burstiness in (0.3, 1.0, 5.0):
        assert times(200, 10.0, burstiness)[-1] == pytest.approx(20)


def test_burstiness_is_the_shape_of_the_intervals():
    spreads = [np.diff(times(4000, 10.0, shape)).std() * 10 for shape in (0.25, 1.0, 4.0, float("inf"))]
    assert spreads == pytest.approx([2, 1, 0.5, 0], abs=0.12)  # 1 / sqrt(shape) of a gamma distribution


def test_ramps():
    linear = RampUp("linear", 1, 10)
    assert [linear.rate(index, 10) for index in (0, 3, 9)] == [1, 4, 10]
    assert RampUp("exponential", 1, 100).rate(1, 3) == pytest.approx(10)
    intervals = np.diff(times(1000, float("inf"), float("inf"), linear))
    assert intervals[0] > 0.9 and intervals[-1] == pytest.approx(0.1) and (np.diff(intervals) < 0).all()


def test_ramps_that_cannot_be():
    assert check_ramp_up("", -1, -1, 5.0) is None
    for options, text in (
        (("linear", 5, 2, float("inf")), "less than end RPS"),
        (("exponential", 0, 2, float("inf")), "cannot be 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_ramp_up(*options)
