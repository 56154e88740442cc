"""`BodyBudget`: bounds the bytes of all bodies that are being read or parsed. Asked by `body`.

Made with the app, one per API process. A body takes what has arrived of it, not what it announces: who sends
nothing takes nothing.
"""

from collections.abc import Callable, Iterator
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
    def open(self) -> Iterator[Callable[[int], None]]:
        """One more body: call what you get with its size as it grows; in the end all is given back.

        It raises HTTPError 503 when the budget has not so much left.
        """
        taken = 0

        def grow_to(num_bytes: int) -> None:
            nonlocal taken
            more = max(0, num_bytes - _FREE_BYTES) - taken
            if self.num_bytes + more > self._max_bytes:
                raise HTTPError(
                    503,
                    f"Other bodies on their way in take {self._max_bytes} bytes (max_pending_body_bytes). "
                    "Nothing was done; try again in a moment.",
                    headers={"Retry-After": "1"},
                )
            self.num_bytes += more
            taken += more

        try:
            yield grow_to
        finally:
            self.num_bytes -= taken
