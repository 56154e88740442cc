"""Orders by what a request says, or by what the cache has of it. First come, first served is the default."""

from typing import Self

from octavo.config.scheduling import SchedulerConfig
from octavo.engine.scheduler.policies.interface import Key, Policy
from octavo.engine.scheduler.request import Request


class FirstComeFirstServed(Policy):
    """By time of arrival at the front."""

    def key(self, request: Request) -> Key:
        return (request.standing.arrival_s,)


class EarliestDeadlineFirst(Policy):
    """By when the answer is due; those that are never due come last, by time of arrival.

    It meets all deadlines whenever any order does, if requests can be cut short.
    """

    def key(self, request: Request) -> Key:
        """Due time, arrival."""
        return (request.due_s, request.standing.arrival_s)


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
        return cls(config.priority_aging_s)

    def key(self, request: Request) -> Key:
        """Priority as seen from the time of arrival, arrival."""
        standing = request.standing
        aging = standing.arrival_s / self._aging_s if self._aging_s else 0.0
        return (standing.priority + aging, standing.arrival_s)


class LongestPrefixFirst(FirstComeFirstServed):
    """By what the cache has of a request; ties, and who was overtaken too often, by time of arrival.

    So requests of one prompt family follow each other while their beginning is in the cache, instead of
    taking it from each other in turns. Idea: cache-aware scheduling of SGLang (Zheng et al., "SGLang:
    Efficient Execution of Structured Language Model Programs", 2024).
    """

    asks_cache = True

    def worth(self, request: Request, num_cached_blocks: int) -> float:
        return num_cached_blocks
