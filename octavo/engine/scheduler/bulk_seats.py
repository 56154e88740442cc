"""`BulkSeats`: who of those that came in bulk may start, so that whoever waits for an answer finds a seat.

In bulk come the lines of batches, responses in the background, and the prompts of one request with very many.
Together they run on half of the seats; which of the tenants that wait comes next is for whoever has the
fewest running. Owned by the tracker, asked by the waiting queue and by a rule.
"""

from collections import Counter
from collections.abc import Iterable

from octavo.engine.scheduler.request import Request


class BulkSeats:
    """Counts running requests that came in bulk, by tenant."""

    def __init__(self, max_num_seqs: int) -> None:
        self._num_left = max(1, max_num_seqs // 2)
        self._running: Counter[str] = Counter()

    @property
    def has_room(self) -> bool:
        """Return True if one more may start."""
        return self._num_left > 0

    def next_of(self, tenants: Iterable[str]) -> str:
        """Return whose turn it is."""
        return min(tenants, key=self._running.__getitem__)

    def take(self, request: Request) -> None:
        """Note a start; others than those in bulk do not count."""
        if request.standing.in_bulk:
            self._num_left -= 1
            self._running[request.standing.tenant] += 1

    def give_back(self, request: Request) -> None:
        """Note that a running request ended, or waits again."""
        if request.standing.in_bulk:
            self._num_left += 1
            self._running[request.standing.tenant] -= 1
            if not self._running[request.standing.tenant]:
                del self._running[request.standing.tenant]
