"""Starts the engine core's process, and sees to it that nothing of it is left.

Used by `zmq.AsyncClient`. Gone with this process in any case: the core notices its parent's death and cleans
up.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack

from octavo.base.processes import Child
from octavo.base.transport import Mailbox, Sender
from octavo.config.engine import EngineConfig
from octavo.messages.control import CoreMessage, Start, core_pipe

_CORE_MODULE = "octavo.engine.process"


class CoreProcess:
    """A running core process and the pipe to it. Used by one thread at a time."""

    def __init__(
        self,
        config: EngineConfig,
        mailbox: Mailbox,
        life: int,
        num_fronts: int,
        on_exit: Callable[[int], None],
    ) -> None:
        """Start core number `life`; `on_exit` gets its exit code, on another thread."""
        opened = ExitStack()
        self._dispose = weakref.finalize(self, opened.close)
        self.pipe: Sender[CoreMessage] = Sender(mailbox.address(core_pipe(life)))
        opened.callback(self.pipe.close, linger_s=0.0)
        self.pipe.send(Start(config.to_msgpack(), num_fronts))
        self._child = Child(_CORE_MODULE, str(mailbox.path), str(life), on_exit=on_exit)
        opened.callback(self._child.end, grace_s=0.0)
        self.pid = self._child.pid

    def end(self, grace_s: float) -> None:
        """Ask the core to end, kill it after `grace_s`; returns when nothing of it is left."""
        if self._dispose.alive:
            if grace_s > 0:
                self._child.terminate()
            self._child.end(grace_s)
            self._dispose()
