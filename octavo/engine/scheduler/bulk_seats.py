"""`BulkSeats`: who of those that came in bulk may start, so that whoever waits for an answer finds a seat.

In bulk come the lines of batches, responses in the background, and the prompts of one request with very many.
Half of the seats are theirs, and the others as long as no other request is open: when one waits for a seat,
they give back what they have beyond the half. Which of the tenants that wait comes next is for whoever has
the fewest running. Owned by the tracker, asked by the waiting queue and by a rule.
"""

from collections import Counter
from collections.abc import Iterable

from octavo.engine.scheduler.request import Request


class BulkSeats:
    """Counts open requests that did not come in bulk, and running ones that did, by tenant."""

    def __init__(self, max_num_seqs: int) -> None:
        self._share = max(1, max_num_seqs // 2)
        self._running: Counter[str] = Counter()
        self.num_others = 0
        """Open requests that did not come in bulk."""
        self.num_running = 0

    @property
    def num_beyond(self) -> int:
        """Running requests beyond their share of the seats; negative if there are fewer."""
        return self.num_running - self._share

    @property
    def has_room(self) -> bool:
        """Return True if one more may start."""
        return self.num_beyond < 0 or not self.num_others

    def next_of(self, tenants: Iterable[str]) -> str:
        """Return whose turn it is."""
        return min(tenants, key=self._running.__getitem__)

    def enter(self, request: Request) -> None:
        """Note a new request."""
        self.num_others += not request.standing.in_bulk

    def leave(self, request: Request) -> None:
        """Note the end of a request."""
        self.num_others -= not request.standing.in_bulk

    def take(self, request: Request) -> None:
        """Note a start; others than those in bulk do not count."""
        if request.standing.in_bulk:
            self.num_running += 1
            self._running[request.standing.tenant] += 1

    def give_back(self, request: Request) -> None:
        """Note that a running request ended, or waits again."""
        if request.standing.in_bulk:
            self.num_running -= 1
            self._running[request.standing.tenant] -= 1
            if not self._running[request.standing.tenant]:
                del self._running[request.standing.tenant]
