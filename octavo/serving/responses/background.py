"""`Background`: responses that nobody need wait for, as tasks of this process; they end with the server.

What one tells as a stream stays here for a while, so that who lost the connection can read on.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any

from octavo.base.errors import Overloaded
from octavo.base.lru import LRU
from octavo.serving.errors import HTTPError

_MAX_TASKS = 1024
_MAX_LOG_BYTES = 64 << 20
"""Of the streams that have ended."""


class EventLog:
    """The events of one response, by number; anybody may read them, from anywhere on, while they come."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._is_over = self._is_whole = False
        self._grown = asyncio.Event()

    def add(self, events: Iterable[bytes]) -> None:
        """Unless no more may come."""
        if self._is_over:
            return
        old = len(self._events)
        self._events += events
        self.num_bytes += sum(map(len, self._events[old:]))
        self._grown.set()
        self._grown = asyncio.Event()

    def end(self, last: Callable[[int], bytes] | None = None) -> None:
        """No more come but `last`, made for its number; without one readers learn that it is missing."""
        if not self._is_over:
            self.add([] if last is None else [last(len(self._events))])
            self._is_over, self._is_whole = True, last is not None

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Those with higher numbers than `after`, to the last. Raises HTTPError when there is none."""
        place = after + 1
        while True:
            grown = self._grown
            if told := b"".join(self._events[place:]):
                place = len(self._events)
                yield told
            elif not self._is_over:
                await grown.wait()
            elif self._is_whole:
                return
            else:
                raise HTTPError(503, "The response is gone: it was deleted, or its server ends.")


class Background:
    """By response id."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._logs: dict[str, EventLog] = {}
        self._ended_logs: LRU[str, EventLog] = LRU(_MAX_LOG_BYTES)

    def check(self) -> None:
        """Raises Overloaded when there are too many."""
        if len(self._tasks) >= _MAX_TASKS:
            raise Overloaded(f"{_MAX_TASKS} responses are under way in the background; try again later.")

    def start(self, response_id: str, work: Coroutine[Any, Any, None], log: EventLog | None = None) -> None:
        """Begin a response; log: where it tells its events."""
        task = self._tasks[response_id] = asyncio.create_task(work)
        if log is not None:
            self._logs[response_id] = log
        task.add_done_callback(lambda _: self._forget(response_id))

    def log(self, response_id: str) -> EventLog | None:
        """None when there was none, or it ended long ago, or another process has it."""
        return self._logs.get(response_id) or self._ended_logs.get(response_id)

    def cancel(self, response_id: str, last: Callable[[int], bytes] | None = None) -> None:
        """End one, if it is here; last: see EventLog.end."""
        if (log := self._logs.get(response_id)) is not None:
            log.end(last)
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()

    async def drained(self) -> None:
        """Until none is left."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    def end(self) -> None:
        """End all."""
        for response_id in list(self._tasks):
            self.cancel(response_id)

    def _forget(self, response_id: str) -> None:
        del self._tasks[response_id]
        if (log := self._logs.pop(response_id, None)) is not None:
            log.end()
            self._ended_logs.put(response_id, log, log.num_bytes)
