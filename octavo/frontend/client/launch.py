"""Starts the engine core's process, and sees to it that nothing of it is left.

Used by `zmq.AsyncClient`. Gone with this process in any case: the core notices its parent's death and cleans
up.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack

from octavo.base.processes import Child, cpu_seconds, dump_stacks
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
        self._pipe: Sender[CoreMessage] = Sender(mailbox.address(core_pipe(life)))
        opened.callback(self._pipe.close, linger_s=0.0)
        self._pipe.send(Start(config.to_msgpack(), num_fronts))
        self._child = Child(_CORE_MODULE, str(mailbox.path), str(life), on_exit=on_exit)
        opened.callback(self._child.end, grace_s=0.0)

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._child.pid

    def send(self, message: CoreMessage) -> None:
        """Hand over a message without waiting. Raises Overloaded when the core has stopped reading."""
        self._pipe.try_send(message)

    def cpu_seconds(self) -> float:
        """CPU time used so far by the core and its workers."""
        return cpu_seconds(self.pid)

    def dump_stacks(self) -> None:
        """Have the core and its workers write to the log what each thread is doing."""
        dump_stacks(self.pid)

    def end(self, grace_s: float) -> None:
        """Ask the core to end, kill it after `grace_s`; returns when nothing of it is left."""
        if self._dispose.alive:
            if grace_s > 0:
                self._child.terminate()
            self._child.end(grace_s)
            self._dispose()
