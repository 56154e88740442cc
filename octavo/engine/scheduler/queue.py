"""The scheduler's two orders: `WaitingQueue` (who starts next) and `RunningSet` (who is served first).

Used by the scheduler only. Both follow the policy; neither knows blocks or budgets.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from operator import itemgetter

from octavo.engine.scheduler.policies import Key, Policy
from octavo.engine.scheduler.request import Request

_Entry = tuple[Key, int, Request]
_place = itemgetter(0, 1)


class WaitingQueue:
    """Requests that wait to start or to resume, in the policy's order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._entries)

    def add(self, request: Request) -> None:
        """Enter `request` at its place."""
        insort(self._entries, self._entry(request), key=_place)

    def remove(self, request: Request) -> None:
        """Take out `request`, which must be in the queue."""
        self.sort()
        index = bisect_left(self._entries, _place(self._entry(request)), key=_place)
        assert self._entries[index][2] is request, f"request {request.request_id} does not wait"
        del self._entries[index]

    def first(self, count: int) -> list[Request]:
        """A copy of the first `count` requests."""
        return [request for _, _, request in islice(self._entries, count)]

    def sort(self) -> None:
        """Bring the order up to date when keys may have changed."""
        if self._policy.is_dynamic:
            self._entries = sorted((self._entry(request) for request in self), key=_place)

    def _entry(self, request: Request) -> _Entry:
        return (self._policy.key(request), request.sequence, request)


class RunningSet:
    """Requests that hold blocks and take part in steps.

    The order of service is the policy's, but the oldest request comes first whatever the policy says. Who
    needs blocks takes them from those behind it; so the oldest is never preempted, ends, and the next is the
    oldest: all end.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._members: set[Request] = set()
        self._order: list[Request] | None = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def add(self, request: Request) -> None:
        """Enter `request`."""
        self._members.add(request)
        self._order = None

    def remove(self, request: Request) -> None:
        """Take out `request`, which must be a member."""
        self._members.remove(request)
        self._order = None

    def in_order(self) -> list[Request]:
        """A copy of the members in order of service."""
        if self._order is None or self._policy.is_dynamic:
            order = sorted(self._members, key=lambda request: (self._policy.key(request), request.sequence))
            if order:
                oldest = min(order, key=lambda request: (request.arrival_s, request.sequence))
                order.remove(oldest)
                order.insert(0, oldest)
            self._order = order
        return self._order.copy()
