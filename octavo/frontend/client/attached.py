"""An engine core that another front owns: this one is attached to its mailbox, and never ends it.

The owner says when the core is lost, the core itself when it (or the next one) is there.
"""

from pathlib import Path

from octavo.base.errors import EngineDead
from octavo.base.transport import Mailbox, Sender
from octavo.frontend.client.backlog import Backlog
from octavo.frontend.client.door import Door
from octavo.messages.control import CoreMessage, FrontMessage, Lost, Ready, core_pipe

_LINGER_S = 0.5


class Dropped(EngineDead):
    """The core lives, and has ended what this front had: it did not read its outputs."""


class AttachedClient(Door):
    """The core of a mailbox, used from one event loop."""

    def __init__(self, mailbox_path: Path, front: int) -> None:
        """front: from 1 to below the owner's num_fronts; used by one process at a time."""
        super().__init__(front)
        self._mailbox = Mailbox(mailbox_path)
        self._pipe: Sender[CoreMessage] | None = None
        self._is_listening = False
        self._num_lost = 0
        """The last life that was lost."""
        self._greeting: Ready | None = None
        """Of a core that nobody has waited for yet."""

    async def start(self) -> Ready:
        """Wait until a core is ready. Raises EngineDead when none will come."""
        self._begin()
        if not self._is_listening:
            self._is_listening = True
            self._listen(self._mailbox)
        if self._greeting is not None:
            self._greet(self._greeting)
        return await self._ready

    async def close(self, timeout_s: float = 5.0) -> None:
        """Leave; the core goes on. May be called twice."""
        self._closing = True
        if not self._is_listening:
            return
        self._is_listening = False
        await self._stop_listening()
        self._lose(EngineDead("This front has left the engine."))
        self._hang_up(_LINGER_S)

    def _hand_over(self, message: CoreMessage) -> None:
        assert self._pipe is not None
        self._pipe.try_send(message)

    def _take_news(self, message: FrontMessage) -> None:
        match message:
            case Ready(life=life) if life > self._num_lost:
                if self._ready.done():
                    self._lose(Dropped("The engine core has dropped this front's requests.", 1.0))
                    self._greeting = message
                else:
                    self._greet(message)
            case Lost(life, error, retry_after_s) if life >= self._life:
                self._num_lost = life
                if self._ready.done() or retry_after_s is None:
                    self._lose(EngineDead(error, retry_after_s))

    def _greet(self, ready: Ready) -> None:
        self._hang_up()
        self._life, self._greeting = ready.life, None
        self._outputs = Backlog()  # what the last core said late is of no use
        self._pipe = Sender(self._mailbox.address(core_pipe(ready.life)))
        self._ready.set_result(ready)

    def _hang_up(self, linger_s: float = 0.0) -> None:
        if self._pipe is not None:
            self._pipe.close(linger_s)
            self._pipe = None
