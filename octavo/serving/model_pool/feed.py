"""`Feed`: the changes of models' states, for who listens. Told by the pool, sent by GET /models/sse."""

import asyncio
from collections.abc import AsyncGenerator

_MAX_BEHIND = 1024
"""Changes that a listener may be behind; one that is further behind misses some."""


class Feed:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[tuple[str, str]]] = set()

    def tell(self, name: str, state: str) -> None:
        """A model is in another state now."""
        for queue in self._queues:
            if not queue.full():
                queue.put_nowait((name, state))

    async def follow(self) -> AsyncGenerator[tuple[str, str], None]:
        """Names with their new states, from now on."""
        queue: asyncio.Queue[tuple[str, str]] = asyncio.Queue(_MAX_BEHIND)
        self._queues.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._queues.discard(queue)
