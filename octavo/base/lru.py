"""`LRU`: a memory bounded by bytes that forgets what was not used for the longest time."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRU(Generic[K, V]):
    """A mapping whose entries have sizes. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value, which counts as used; None when it is not here."""
        if (found := self._entries.get(key)) is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def clear(self) -> None:
        """Forget all."""
        self.num_bytes = 0
        self._entries.clear()

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Enter or replace a value; others go when the bound is passed, and so does one larger than it."""
        if key in self._entries:
            self.num_bytes -= self._entries.pop(key)[1]
        self._entries[key] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._entries.popitem(last=False)[1][1]
