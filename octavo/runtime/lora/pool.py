"""`AdapterPool` keeps adapters in host memory by their contents; the least recently used goes first."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

import msgspec

from octavo.base.errors import OctavoError
from octavo.messages.adapters import AdapterRef, SoftPromptRef

R = TypeVar("R", bound=AdapterRef | SoftPromptRef)
A = TypeVar("A")


class AdapterPool(Generic[R, A]):
    """Adapters by key, loaded once however many ask. Thread-safe. most: adapters, unless more are pinned"""

    def __init__(self, kind: type[R], read: Callable[[R], A], most: int) -> None:
        self._kind, self._read, self._most = kind, read, most
        self._lock = Lock()
        self._entries: OrderedDict[bytes, Future[A]] = OrderedDict()
        self._pinned: set[bytes] = set()
        self.num_loads = self.num_hits = self.num_evictions = 0

    def get(self, ref: R) -> A:
        """Return an adapter, read now if need be. Raises RequestError; the next call reads anew."""
        future, is_new = self._enter(ref.key)
        if is_new:
            self._load(ref, future)
        return future.result()

    def begin(self, ref: R) -> None:
        """Have an adapter read by a thread of its own."""
        future, is_new = self._enter(ref.key)
        if is_new:
            Thread(target=self._load, args=(ref, future), name="adapter", daemon=True).start()

    def has(self, key: bytes) -> bool:
        """Return True if an adapter is here, or is being read."""
        return key in self._entries

    def is_loading(self, ref: R) -> bool:
        """Return True while an adapter is being read."""
        with self._lock:
            future = self._entries.get(ref.key)
        return future is not None and not future.done()

    def load(self, ref: Any, *, waits: bool) -> str | None:
        """Load an adapter, beside the steps; return None while that lasts, "" at the end, or what is wrong.

        ref: a reference as plain values; waits: begin nothing, look whether it is done
        """
        adapter = msgspec.convert(ref, self._kind)
        if not waits:
            self.begin(adapter)
        if not waits or self.is_loading(adapter):
            return None
        try:
            self.get(adapter)
        except OctavoError as error:
            return str(error)
        return ""

    def pin(self, key: bytes) -> bool:
        """Keep an adapter until it is dropped; return False if it is not here."""
        with self._lock:
            if key in self._entries:
                self._pinned.add(key)
            return key in self._entries

    def drop(self, key: bytes) -> None:
        """Forget an adapter; requests that have it keep it."""
        with self._lock:
            self._pinned.discard(key)
            self._entries.pop(key, None)

    @property
    def commands(self) -> dict[str, Callable[..., Any]]:
        """Return what the front may ask of it, by verb."""
        return {
            "adapter_counts": self.counts,
            "drop_adapter": self.drop,
            "load_adapter": self.load,
            "pin_adapter": self.pin,
        }

    def counts(self) -> dict[str, int]:
        """Return how often adapters were loaded, found and evicted."""
        return {"loads": self.num_loads, "hits": self.num_hits, "evictions": self.num_evictions}

    def _enter(self, key: bytes) -> tuple["Future[A]", bool]:
        with self._lock:
            if (future := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
                self.num_hits += 1
                return future, False
            future = self._entries[key] = Future()
            others = [name for name in self._entries if name not in self._pinned and name != key]
            for name in others[: max(0, len(self._entries) - self._most)]:
                del self._entries[name]
                self.num_evictions += 1
            return future, True

    def _load(self, ref: R, future: "Future[A]") -> None:
        try:
            future.set_result(self._read(ref))
            self.num_loads += 1
        except Exception as error:  # whoever waits gets it
            self.drop(ref.key)
            future.set_exception(error)
