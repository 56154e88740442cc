"""`Preparation`: requests that take their time before the core can add them wait here, beside its loop.

Between the reader of the core's process and its inbox. Messages that refer to requests do not overtake those
that wait; everything else passes at once.
"""

import threading
from collections.abc import Callable
from queue import Queue

from octavo.engine.core import EngineCore
from octavo.messages.control import Abort, CoreMessage, Detach
from octavo.messages.request import EngineRequest


class Preparation:
    """One thread and its queue. Fed by one thread; ends with the process."""

    def __init__(self, core: EngineCore, deliver: Callable[[CoreMessage], None]) -> None:
        """deliver: hands a message to the core's loop, on any thread."""
        self._core = core
        self._deliver = deliver
        self._queue: Queue[CoreMessage] = Queue()
        self._thread: threading.Thread | None = None

    def take(self, message: CoreMessage) -> None:
        """Take a message that has arrived."""
        takes_time = isinstance(message, EngineRequest) and self._core.takes_time(message)
        if takes_time or (isinstance(message, Abort | Detach) and self._queue.unfinished_tasks):
            self._queue.put(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="core-preparation", daemon=True)
                self._thread.start()
        else:
            self._deliver(message)

    def _run(self) -> None:
        while True:
            message = self._queue.get()
            if isinstance(message, EngineRequest):
                self._core.prepare(message)
            self._deliver(message)
            self._queue.task_done()
