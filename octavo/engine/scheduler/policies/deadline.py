"""Earliest deadline first: meets all deadlines whenever any order does, if requests can be cut short."""

from octavo.engine.scheduler.policies.interface import Key, Policy
from octavo.engine.scheduler.request import Request


class EarliestDeadlineFirst(Policy):
    """By when the answer is due; those that are never due come last, by time of arrival."""

    def key(self, request: Request) -> Key:
        """Due time, arrival."""
        return (request.due_s, request.standing.arrival_s)
