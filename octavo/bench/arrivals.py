"""When requests are sent: open loop, so that a slow server does not slow the load down.

Intervals are gamma distributed with shape `burstiness` (1 = a Poisson process, below 1 = in bursts, inf =
even), as in `vllm bench serve`: with a fixed rate they are scaled so that all requests are sent in
num_requests / rate seconds.
"""

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from octavo.base.errors import ConfigError


class RampUp(NamedTuple):
    """A rate that grows over the requests."""

    strategy: str
    """linear or exponential"""
    start_rps: float
    end_rps: float

    def rate(self, index: int, count: int) -> float:
        """Return the requests per second at request `index` of `count`."""
        progress = index / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return float(self.start_rps * (self.end_rps / self.start_rps) ** progress)


def check_ramp_up(strategy: str, start_rps: float, end_rps: float, request_rate: float) -> RampUp | None:
    """Return the ramp that options ask for, if any. Raises ConfigError."""
    if not strategy:
        return None
    if request_rate != float("inf"):
        raise ConfigError("When using ramp-up, do not specify --request-rate: the ramp says the rate.")
    if start_rps < 0 or end_rps <= 0:
        raise ConfigError(
            "When using --ramp-up-strategy, both --ramp-up-start-rps and --ramp-up-end-rps must "
            "be specified, "
            "and not be negative."
        )
    if start_rps > end_rps:
        raise ConfigError(f"Ramp-up start RPS must be less than end RPS: {start_rps:g} > {end_rps:g}.")
    if strategy == "exponential" and start_rps == 0:
        raise ConfigError("For exponential ramp-up, the start RPS cannot be 0.")
    return RampUp(strategy, start_rps, end_rps)


def send_times(
    count: int, rate: float, burstiness: float, draw: np.random.Generator, ramp: RampUp | None = None
) -> list[float]:
    """Return the seconds after the start at which each of `count` requests is sent, in order."""
    rates = [ramp.rate(index, count) if ramp else rate for index in range(count)]
    times = list(accumulate(_interval(each, burstiness, draw) for each in rates))
    if ramp is None and times and times[-1] > 0:
        factor = count / rate / times[-1]
        times = [time * factor for time in times]
    return times


def _interval(rate: float, burstiness: float, draw: np.random.Generator) -> float:
    if rate in (0, float("inf")):  # a ramp may begin at 0: its first request starts it
        return 0.0
    if burstiness == float("inf"):
        return 1 / rate
    return float(draw.gamma(burstiness, 1 / (rate * burstiness)))
