"""`BodyBudget`: bounds the bytes of all bodies that are being read or parsed. Asked by `body` and `files`.

Made with the app, two per API process: of bodies in memory, and of files. A body takes what has arrived of
it, not what it announces: who sends nothing takes nothing. Whoever sends much and never ends leaves a part to
others, until the connection's body_timeout ends it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import HTTPConnection

from octavo.config.server import ServerConfig
from octavo.serving.errors import HTTPError

_FREE_BYTES = 2**16
"""Of every body: small requests are read however many large ones are on their way."""


def body_budget(config: ServerConfig) -> "BodyBudget":
    """Of bodies in memory: one sender takes half of it, and one body of any size at least."""
    most_of_one = max(config.max_pending_body_bytes // 2, config.max_request_bytes)
    return BodyBudget(config.max_pending_body_bytes, "max_pending_body_bytes", most_of_one)


class BodyBudget:
    """Used on one event loop."""

    def __init__(self, max_bytes: int, name: str, most_of_one: int) -> None:
        """name: of what sets the limit; most_of_one: what one sender may take."""
        self._max_bytes = max_bytes
        self._name = name
        self._most_of_one = most_of_one
        self._by_sender: Counter[str] = Counter()
        self.num_bytes = 0
        """Taken by all bodies, beyond what each has free."""

    @contextmanager
    def open(self, connection: HTTPConnection) -> Iterator[Callable[[int], None]]:
        """One more body: call what you get with its size as it grows; in the end all is given back.

        It raises HTTPError 503 when the budget, or the sender's part of it, has not so much left.
        """
        taken, sender = 0, _sender_of(connection)

        def grow_to(num_bytes: int) -> None:
            more = max(0, num_bytes - _FREE_BYTES) - taken
            if self.num_bytes + more > self._max_bytes or self._by_sender[sender] + more > self._most_of_one:
                raise HTTPError(
                    503,
                    f"Other bodies on their way in leave no room: {self._max_bytes} bytes in all "
                    f"({self._name}), {self._most_of_one} of one sender. Nothing was done; try again soon.",
                    headers={"Retry-After": "1"},
                )
            take(more)

        def take(more: int) -> None:
            nonlocal taken
            taken += more
            self.num_bytes += more
            self._by_sender[sender] += more
            if not self._by_sender[sender]:
                del self._by_sender[sender]

        try:
            yield grow_to
        finally:
            take(-taken)


def _sender_of(connection: HTTPConnection) -> str:
    """Return whose key it is; without keys, the address."""
    tenant: str = connection.scope.get("state", {}).get("tenant", "")
    return tenant or (connection.client.host if connection.client else "")
