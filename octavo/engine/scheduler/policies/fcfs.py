"""First come, first served: the default."""

from octavo.engine.scheduler.policies.interface import Key, Policy
from octavo.engine.scheduler.request import Request


class FirstComeFirstServed(Policy):
    """By time of arrival at the front."""

    def key(self, request: Request) -> Key:
        """Arrival."""
        return (request.standing.arrival_s,)
