"""`MetricsBoard`: everything that one API process of the server can tell to a metrics page.

Made with the app. The engines' figures, those of HTTP, and the machine's; with several API processes the
sum of all, whichever is asked.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from octavo.metrics import Metric
from octavo.metrics.collection import Collection
from octavo.metrics.machine import Machine
from octavo.metrics.totals import Totals
from octavo.serving.engines import MetricsSource

_INTERVAL_S = 0.5


class MetricsBoard:
    """The figures of one API process, used on its event loop."""

    def __init__(
        self, engines: MetricsSource, refresh: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """refresh: has the engines tell what they tell only when asked"""
        self.http = Collection()
        self._refresh = refresh
        self._engines = engines
        self._totals: Totals | None = None
        self._machine = Machine(os.getpid(), **engines.labels)
        self._turn = asyncio.Lock()

    async def share(self, folder: Path, server_pid: int) -> None:
        """Task, where there are several API processes: meet the others in `folder`, until cancelled.

        folder: of all API processes of this server, and of its life
        server_pid: the process above all of them
        """
        self._totals = Totals(folder)
        self._machine = Machine(server_pid, **self._engines.labels)
        while True:
            async with self._turn:
                await asyncio.to_thread(self._totals.publish, self._snapshot())
            await asyncio.sleep(_INTERVAL_S)

    async def read(self) -> list[Metric]:
        """All series of all API processes."""
        if self._refresh is not None:
            await self._refresh()
        async with self._turn:
            return await asyncio.to_thread(self._read, self._snapshot())

    def _snapshot(self) -> list[Metric]:
        return [*self._engines.snapshot(), *self.http.snapshot()]

    def _read(self, own: list[Metric]) -> list[Metric]:
        if self._totals is not None:
            self._totals.publish(own)
            own = self._totals.read(own)
        return [*own, *self._machine.snapshot()]
