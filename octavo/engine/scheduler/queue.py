"""The scheduler's two orders: `WaitingQueue` (who starts next) and `RunningSet` (who is served first).

Used by the scheduler only. Both follow the policy: requests stand in its lines, and lines take turns. Neither
knows blocks or budgets.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from operator import itemgetter

from octavo.engine.scheduler.bulk_seats import BulkSeats
from octavo.engine.scheduler.policies.interface import Key, Policy
from octavo.engine.scheduler.request import Request

MAX_AHEAD = 64
"""Other requests that may start before the next one in bulk."""
_Entry = tuple[Key, int, Request]
_place = itemgetter(0, 1)


class WaitingQueue:
    """Requests that wait to start or to resume, in the policy's order; those in bulk come last, by tenant."""

    def __init__(self, policy: Policy, bulk_seats: BulkSeats) -> None:
        self._policy = policy
        self._bulk_seats = bulk_seats
        self._lines: dict[str, list[_Entry]] = {}
        self._bulk: dict[str, list[_Entry]] = {}
        """Lines by tenant."""
        self._num_requests = 0
        self._num_ahead = 0
        """Others that were offered since the last in bulk."""

    def __len__(self) -> int:
        return self._num_requests

    def add(self, request: Request) -> None:
        """Enter `request` at its place."""
        lines, name = self._place_of(request)
        insort(lines.setdefault(name, []), self._entry(request), key=_place)
        self._num_requests += 1

    def remove(self, request: Request) -> None:
        """Take out `request`, which must be in the queue."""
        lines, name = self._place_of(request)
        line = lines.get(name, [])
        is_next = line and line[0][2] is request
        index = 0 if is_next else bisect_left(line, _place(self._entry(request)), key=_place)
        assert index < len(line) and line[index][2] is request, f"request {request.request_id} does not wait"
        del line[index]
        if not line:
            del lines[name]
        self._num_requests -= 1

    def first(self, count: int) -> Iterator[Request]:
        """Yield the first `count` requests; meanwhile they may be removed, and their lines charged.

        What the start of one costs its line counts before the next is chosen. Those in bulk are left out when
        no more may run.
        """
        return self._with_bulk(count) if self._bulk else self._in_lines(count)

    def _with_bulk(self, count: int) -> Iterator[Request]:
        """Others first, so that no crowd's prompts are before theirs; one in bulk after MAX_AHEAD of them."""
        others, in_bulk = self._in_lines(count), self._of_bulk(count)
        for _ in range(count):
            request = next(others, None) if self._num_ahead < MAX_AHEAD else None
            self._num_ahead = 0 if request is None else self._num_ahead + 1
            request = request or next(in_bulk, None) or next(others, None)
            if request is None:
                return
            yield request

    def _of_bulk(self, count: int) -> Iterator[Request]:
        lines = {tenant: iter(line[:count]) for tenant, line in self._bulk.items()}
        while lines and self._bulk_seats.has_room:
            tenant = self._bulk_seats.next_of(lines)
            entry = next(lines[tenant], None)
            if entry is None:
                del lines[tenant]
            else:
                yield entry[2]

    def _in_lines(self, count: int) -> Iterator[Request]:
        turn = self._policy.turn
        heads = [
            (turn(name), line[0], name, iter(line[1:count])) for name, line in self._lines.items()
        ]  # no two entries are equal, so the comparison ends there
        heapify(heads)
        for _ in range(count):
            if not heads:
                return
            _, (_, _, request), name, others = heads[0]
            yield request
            following = next(others, None)
            if following is None:
                heappop(heads)
            else:
                heapreplace(heads, (turn(name), following, name, others))

    def _place_of(self, request: Request) -> tuple[dict[str, list[_Entry]], str]:
        if request.standing.in_bulk:
            return self._bulk, request.standing.tenant
        return self._lines, self._policy.line(request)

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
        self._lines: dict[str, list[Request]] | None = {}
        """The members but the oldest, each line in order; None when that has to be found anew."""
        self._oldest: list[Request] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """In no order."""
        return iter(self._members)

    def add(self, request: Request) -> None:
        """Enter `request`."""
        self._members.add(request)
        self._lines = None

    def remove(self, request: Request) -> None:
        """Take out `request`, which must be a member."""
        self._members.remove(request)
        self._lines = None

    def in_order(self) -> list[Request]:
        """Return a copy of the members in order of service."""
        lines = self._lines if self._lines is not None else self._line_up()
        order = self._oldest.copy()
        for name in sorted(lines, key=self._policy.turn) if len(lines) > 1 else lines:
            order += lines[name]
        return order

    def _line_up(self) -> dict[str, list[Request]]:
        members = sorted(self._members, key=lambda request: (self._policy.key(request), request.sequence))
        self._oldest = []
        self._lines = {}
        if members:
            oldest = min(members, key=lambda request: (request.standing.arrival_s, request.sequence))
            members.remove(oldest)
            self._oldest.append(oldest)
        for request in members:
            self._lines.setdefault(self._policy.line(request), []).append(request)
        return self._lines
