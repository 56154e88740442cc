"""`Timeouts`: when each open request's time is over. Owned by the core, which asks once per step.

Knows ids and times, not what becomes of the requests. The heap also holds the times of requests that have
ended; they are passed over when they come up, and swept out when they are the most.
"""

from heapq import heapify, heappop, heappush
from math import inf

from octavo.messages.request import EngineRequest

_FEW = 64


class Timeouts:
    """The open requests that have a time limit, by the monotonic clock."""

    def __init__(self, max_request_s: float = 0.0) -> None:
        """max_request_s: limit of every request, from its arrival; 0 = none."""
        self._max_request_s = max_request_s or inf
        self._ends_s: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def add(self, request: EngineRequest) -> None:
        """Watch `request`, if it has a limit."""
        limit_s = min(request.limits.timeout_s or inf, self._max_request_s)
        if limit_s < inf:
            end_s = self._ends_s[request.request_id] = request.standing.arrival_s + limit_s
            heappush(self._heap, (end_s, request.request_id))

    def discard(self, request_id: str) -> None:
        """Watch it no longer; an unknown id is skipped."""
        if self._ends_s.pop(request_id, None) is not None and len(self._heap) > 2 * len(self._ends_s) + _FEW:
            self._heap = [(end_s, name) for name, end_s in self._ends_s.items()]
            heapify(self._heap)

    def next_s(self) -> float | None:
        """Return when the next one's time is over; None while nobody has a limit."""
        heap = self._heap
        while heap and self._ends_s.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def take_late(self, now_s: float) -> list[str]:
        """Those whose time is over, in that order; they are watched no longer."""
        late = []
        while (end_s := self.next_s()) is not None and end_s <= now_s:
            late.append(heappop(self._heap)[1])
            del self._ends_s[late[-1]]
        return late
