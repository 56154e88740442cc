"""Scheduling policies: who comes first among the waiting, and who gives way last among the running.

Used by the scheduler's queues. A policy sees requests, never blocks or steps. Plug-ins register their own.
"""

from abc import ABC, abstractmethod

from octavo.base.registry import Registry
from octavo.engine.scheduler.request import Request

Key = tuple[float, ...]


class Policy(ABC):
    """An order of requests; equal keys go by order of arrival."""

    is_dynamic: bool = False
    """True when keys change while requests wait: `charge` is called, queues are sorted every step."""

    @abstractmethod
    def key(self, request: Request) -> Key:
        """Smaller comes first. A preempted request has the key it always had, so it keeps its place."""

    def charge(self, request: Request, num_tokens: int) -> None:  # noqa: B027  # static orders ignore it
        """Note that `num_tokens` of `request` were scheduled; called for dynamic policies only."""


class FirstComeFirstServed(Policy):
    """By time of arrival at the front."""

    def key(self, request: Request) -> Key:
        """Arrival."""
        return (request.arrival_s,)


class PriorityFirst(Policy):
    """By the user's priority, smaller first; ties by time of arrival."""

    def key(self, request: Request) -> Key:
        """Priority, arrival."""
        return (request.priority, request.arrival_s)


POLICIES: Registry[type[Policy]] = Registry(
    "scheduling policy",
    {
        "fcfs": "octavo.engine.scheduler.policies:FirstComeFirstServed",
        "priority": "octavo.engine.scheduler.policies:PriorityFirst",
    },
)
