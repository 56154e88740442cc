"""`RetainedRequests`: blocks of requests that have ended, kept because followers will go on from them.

Owned by the tracker; the scheduler looks leaders up in it. It is a cache: the oldest is let go whenever a
request needs its blocks, and a follower that comes too late finds what the prefix map still has.
"""

from collections.abc import Iterator

from octavo.engine.kvcache.manager import KVCacheManager
from octavo.engine.scheduler.request import Request


class RetainedRequests:
    """Ended requests that still own a table, oldest first."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def get(self, request_id: str) -> Request | None:
        """Return the retained request of this id."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Retain what `request` leaves."""
        self._requests[request.request_id] = request

    def drop(self, request_id: str) -> None:
        """Free the blocks that no other request shares; an unknown id is skipped."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            assert request.table is not None
            self._kv.release(request.table)
            request.table = None

    def drop_oldest(self) -> bool:
        """Make room; return False if nothing is retained."""
        oldest = next(iter(self._requests), None)
        if oldest is None:
            return False
        self.drop(oldest)
        return True
