"""Weighted fair shares of the computed tokens among tenants.

Each tenant's spending is counted in tokens divided by its weight; who has spent least is served next, so that
over time the shares of those who always have requests waiting are as their weights. Tokens found in the cache
were not computed and cost nothing. A tenant that comes (back) starts level with the least served of the
others: idleness earns no credit. Idea: virtual token counters (Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024).
"""

from collections import Counter
from collections.abc import Mapping
from math import inf
from typing import Self

from octavo.config.scheduling import SchedulerConfig
from octavo.engine.scheduler.policies.interface import Key, Policy
from octavo.engine.scheduler.request import Request


class FairShares(Policy):
    """One line per tenant, each by time of arrival."""

    takes_turns = True

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """weights: > 0, by tenant; 1 for those not named."""
        self._weights = weights or {}
        self._num_open: Counter[str] = Counter()
        """Requests per tenant that has any."""
        self._spent: dict[str, float] = {}
        """By tenant: those with open requests, and those that are still ahead of them all."""

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        return cls(config.fair_weights)

    def key(self, request: Request) -> Key:
        return (request.standing.arrival_s,)

    def line(self, request: Request) -> str:
        return request.standing.tenant

    def turn(self, line: str) -> float:
        return self._spent[line]

    def enter(self, request: Request) -> None:
        """Bring a tenant that was idle level with the least served; forget those who were idle behind it."""
        tenant = request.standing.tenant
        if tenant not in self._num_open:
            least = min((self._spent[other] for other in self._num_open), default=inf)
            self._spent = {other: spent for other, spent in self._spent.items() if spent >= least}
            self._spent.setdefault(tenant, least if self._num_open else 0.0)
        self._num_open[tenant] += 1

    def leave(self, request: Request) -> None:
        tenant = request.standing.tenant
        self._num_open[tenant] -= 1
        if not self._num_open[tenant]:
            del self._num_open[tenant]

    def charge(self, request: Request, num_tokens: int) -> None:
        tenant = request.standing.tenant
        self._spent[tenant] += num_tokens / self._weights.get(tenant, 1.0)
