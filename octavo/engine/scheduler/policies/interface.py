"""`Policy`: an order of requests. Implemented beside this file, used by the scheduler's queues and tracker.

Requests stand in lines, one unless the policy says otherwise. A line's order never changes; which line is
served next may change with every token. So a queue of thousands costs nothing to keep in order. A policy sees
requests, never blocks or steps; one that asks is told how much of a request the cache has, and may change the
order among the first in line.
"""

from abc import ABC, abstractmethod
from typing import Self

from octavo.config.scheduling import SchedulerConfig
from octavo.engine.scheduler.request import Request

Key = tuple[float, ...]


class Policy(ABC):
    """Who comes first; who comes last gives way first when blocks are short."""

    takes_turns: bool = False
    """True when there are several lines, and `charge` moves them."""
    asks_cache: bool = False
    """True when `worth` decides who of the first in line starts next."""

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """Return the policy as configured."""
        return cls()

    @abstractmethod
    def key(self, request: Request) -> Key:
        """Smaller comes first in its line; equal keys go by order of arrival.

        It never changes: a preempted request gets its old place back.
        """

    def line(self, request: Request) -> str:
        """Return the line that `request` stands in."""
        return ""

    def turn(self, line: str) -> float:
        """The line with the smallest turn is served next; known as long as the line has open requests."""
        return 0.0

    def worth(self, request: Request, num_cached_blocks: int) -> float:
        """Of the first in line, the largest starts first; called only if the policy asks the cache.

        num_cached_blocks: leading blocks of its tokens that are in the cache, as far as known
        """
        return 0.0

    def enter(self, request: Request) -> None:
        """Note that `request` has come."""

    def leave(self, request: Request) -> None:
        """Note that `request` has ended."""

    def charge(self, request: Request, num_tokens: int) -> None:
        """Note that `num_tokens` of `request` are computed; called only if the policy takes turns."""
