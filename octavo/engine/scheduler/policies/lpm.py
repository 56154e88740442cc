"""Longest cached prefix first: who shares most with what the cache holds goes first.

So requests of one prompt family follow each other while their beginning is in the cache, instead of taking it
from each other in turns. Idea: cache-aware scheduling of SGLang (Zheng et al., "SGLang: Efficient Execution
of Structured Language Model Programs", 2024).
"""

from octavo.engine.scheduler.policies.fcfs import FirstComeFirstServed
from octavo.engine.scheduler.request import Request


class LongestPrefixFirst(FirstComeFirstServed):
    """By what the cache has of a request; ties, and who was overtaken too often, by time of arrival."""

    asks_cache = True

    def worth(self, request: Request, num_cached_blocks: int) -> float:
        """Return how many blocks need not be computed."""
        return num_cached_blocks
