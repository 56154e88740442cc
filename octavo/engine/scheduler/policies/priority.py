"""Priorities, with or without aging."""

from typing import Self

from octavo.config.scheduling import SchedulerConfig
from octavo.engine.scheduler.policies.interface import Key, Policy
from octavo.engine.scheduler.request import Request


class PriorityFirst(Policy):
    """By the user's priority, smaller first; ties by time of arrival.

    Without aging, a steady stream of urgent requests keeps the others waiting for ever. With it, a request
    goes before those that are better by p and come more than p x aging_s later. All age alike, so the order
    is known when they arrive: priority + arrival / aging_s.
    """

    def __init__(self, aging_s: float = 0.0) -> None:
        """aging_s: seconds of waiting that improve the priority by one; 0 = no aging."""
        self._aging_s = aging_s

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """With the configured aging."""
        return cls(config.priority_aging_s)

    def key(self, request: Request) -> Key:
        """Priority as seen from the time of arrival, arrival."""
        standing = request.standing
        aging = standing.arrival_s / self._aging_s if self._aging_s else 0.0
        return (standing.priority + aging, standing.arrival_s)
