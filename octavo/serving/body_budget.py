"""`BodyBudget`: bounds the bytes of all bodies that are being read or parsed. Asked by `body`.

Made with the app, one per API process. A body takes what has arrived of it, not what it announces: who sends
nothing takes nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.serving.errors import HTTPError

_FREE_BYTES = 2**16
"""Of every body: small requests are read however many large ones are on their way."""


class BodyBudget:
    """Used on one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Taken by all bodies, beyond what each has free."""

    @contextmanager
    def open(self) -> Iterator["OpenBody"]:
        """One more body; what it has taken is given back in the end."""
        body = OpenBody(self)
        try:
            yield body
        finally:
            self.num_bytes -= body.num_taken

    def take(self, num_bytes: int) -> None:
        """Raise HTTPError 503 when the budget has not so much left."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise HTTPError(
                503,
                f"Other bodies on their way in take {self._max_bytes} bytes (max_pending_body_bytes). "
                "Nothing was done; try again in a moment.",
                headers={"Retry-After": "1"},
            )
        self.num_bytes += num_bytes


class OpenBody:
    """What one body takes."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_taken = 0

    def grow_to(self, num_bytes: int) -> None:
        """So many bytes of it have arrived. Raises HTTPError 503."""
        more = max(0, num_bytes - _FREE_BYTES) - self.num_taken
        self._budget.take(more)
        self.num_taken += more
