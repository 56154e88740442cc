"""Starts the engine core's process, and sees to it that nothing of it is left: no process, no directory.

Used by `zmq.AsyncClient`. Gone with this process in any case: the core notices its parent's death and cleans
up.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack

from octavo.base.processes import Child
from octavo.base.transport import Mailbox, Sender
from octavo.config.engine import EngineConfig
from octavo.messages.control import CORE_PIPE, FRONT_PIPE, CoreMessage, Start

_CORE_MODULE = "octavo.engine.process"


class CoreProcess:
    """A running core process and the pipe to it. Used by one thread at a time."""

    def __init__(self, config: EngineConfig, on_exit: Callable[[int], None]) -> None:
        """Start it; `on_exit` gets its exit code, on another thread."""
        content = config.to_msgpack()
        opened = ExitStack()
        self._dispose = weakref.finalize(self, opened.close)
        mailbox = Mailbox.create()
        opened.callback(mailbox.close)
        self._pipe: Sender[CoreMessage] = Sender(mailbox.address(CORE_PIPE))
        opened.callback(self._pipe.close, linger_s=0.0)
        self._pipe.send(Start(content))
        self._child = Child(_CORE_MODULE, str(mailbox.path), on_exit=on_exit)
        opened.callback(self._child.end, grace_s=0.0)
        self.address = mailbox.address(FRONT_PIPE)
        """Where the core sends its messages; to be bound by the caller."""

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._child.pid

    def send(self, message: CoreMessage) -> None:
        """Hand over a message without waiting. Raises Overloaded when the core has stopped reading."""
        self._pipe.try_send(message)

    def end(self, grace_s: float) -> None:
        """Ask the core to end, kill it after `grace_s`; returns when nothing of it is left."""
        if self._dispose.alive:
            self._child.terminate()
            self._child.end(grace_s)
            self._dispose()
