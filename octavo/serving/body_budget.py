"""`BodyBudget`: bounds the bytes of all bodies that are being read or parsed. Asked by `body` and `files`.

Made with the app, two per API process: of bodies in memory, and of files. A body takes what has arrived of
it, not what it announces: who sends nothing takes nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.serving.errors import HTTPError

_FREE_BYTES = 2**16
"""Of every body: small requests are read however many large ones are on their way."""


class BodyBudget:
    """Used on one event loop."""

    def __init__(self, max_bytes: int, name: str = "max_pending_body_bytes", most_of_one: int = 0) -> None:
        """name: of what sets the limit; most_of_one: what one tenant may take, 0 = all."""
        self._max_bytes = max_bytes
        self._name = name
        self._most_of_one = most_of_one or max_bytes
        self._by_tenant: Counter[str] = Counter()
        self.num_bytes = 0
        """Taken by all bodies, beyond what each has free."""

    @contextmanager
    def open(self, tenant: str = "") -> Iterator[Callable[[int], None]]:
        """One more body: call what you get with its size as it grows; in the end all is given back.

        It raises HTTPError 503 when the budget, or the tenant's part of it, has not so much left.
        """
        taken = 0

        def grow_to(num_bytes: int) -> None:
            more = max(0, num_bytes - _FREE_BYTES) - taken
            if self.num_bytes + more > self._max_bytes or self._by_tenant[tenant] + more > self._most_of_one:
                raise HTTPError(
                    503,
                    f"Other bodies on their way in leave no room: {self._max_bytes} bytes in all "
                    f"({self._name}), {self._most_of_one} of one tenant. Nothing was done; try again soon.",
                    headers={"Retry-After": "1"},
                )
            take(more)

        def take(more: int) -> None:
            nonlocal taken
            taken += more
            self.num_bytes += more
            self._by_tenant[tenant] += more
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]

        try:
            yield grow_to
        finally:
            take(-taken)
