"""`Background`: responses that nobody waits for, as tasks of this process; they end with the server."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from octavo.base.errors import Overloaded

_MAX_TASKS = 1024


class Background:
    """By response id."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def check(self) -> None:
        """Raises Overloaded when there are too many."""
        if len(self._tasks) >= _MAX_TASKS:
            raise Overloaded(f"{_MAX_TASKS} responses are under way in the background; try again later.")

    def start(self, response_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Begin a response."""
        task = self._tasks[response_id] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(response_id, None))

    def cancel(self, response_id: str) -> None:
        """End one, if it is here."""
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()

    async def drained(self) -> None:
        """Until none is left."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    def end(self) -> None:
        """End all."""
        for task in self._tasks.values():
            task.cancel()
