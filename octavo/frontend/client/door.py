"""`Door`: a front's end of the door to an engine core in another process, on an asyncio event loop.

What the front that owns the core (`zmq`) and those that only use it (`attached`) have in common. The core may
end and another one come: each core is one life of the door, from `start` to the EngineDead that `outputs`
raises; while that error says that there will be another core, `start` may be called again.
"""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import suppress
from copy import copy
from typing import Any

from octavo.base.errors import EngineDead, OctavoError, Overloaded
from octavo.base.log import get_logger
from octavo.base.transport import AsyncReceiver, BadFrame, Mailbox
from octavo.frontend.client.backlog import Backlog
from octavo.messages import control
from octavo.messages.request import EngineOutputs, EngineRequest

logger = get_logger(__name__)


class Door(ABC):
    """One engine core after the other, used from one event loop."""

    def __init__(self, front: int) -> None:
        """front: the number of this front; 0 owns the core."""
        self._front = front
        self._call_ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._unsent_aborts: list[str] = []
        """They found the pipe full."""
        self._life = 0
        """Number of the present core, or of the last one."""
        self._error: OctavoError | None = None
        """Why the present core is gone."""
        self._outputs = Backlog()
        self.standing: dict[str, dict[str, Any]] = {}
        """What the core was told to stand still by, or to sleep; the next one is told it, too."""
        self._closing = False
        self.is_stalled = False
        """True when the core was found to hang, until it is gone."""

    @abstractmethod
    async def start(self) -> control.Ready:
        """Begin a life: wait until a core is ready. Raises what keeps it from that."""

    @abstractmethod
    async def close(self, timeout_s: float = 5.0) -> None:
        """Leave the door, and end the core if it is ours. May be called twice."""

    async def give_up(self, error: EngineDead) -> None:
        """End this life, as the core is of no use without another; `start` may follow."""
        self._lose(error)

    @abstractmethod
    def _hand_over(self, message: control.CoreMessage) -> None:
        """Send without waiting. Raises Overloaded when the core has stopped reading."""

    @abstractmethod
    def _take_news(self, message: control.FrontMessage) -> None:
        """What a message about the core's life means."""

    def add(self, request: EngineRequest) -> None:
        """Hand over a request; it ends with exactly one finish reason in `outputs`.

        Raises EngineDead, and Overloaded when the core has stopped reading (nothing was done then).
        """
        request.front = self._front
        self._send(request)

    def abort(self, request_ids: list[str]) -> None:
        """End these requests; unknown and finished ids are skipped. Raises EngineDead."""
        self._unsent_aborts += request_ids
        try:
            self._send(control.Abort(self._unsent_aborts))
        except Overloaded:
            return  # said again with the next output
        self._unsent_aborts = []

    def detach(self, front: int) -> None:
        """The process of another front has ended: the core drops what it had."""
        if self._error is None:  # else there is nothing to drop
            self._send(control.Detach(front))

    def tell_fronts(self, request_ids: list[str] | None, tenant: str | None) -> None:
        """Have the other fronts of this core end requests of theirs. Raises EngineDead."""
        with suppress(Overloaded):  # nobody waits for an answer to this
            self._send(control.EndRequests(self._front, request_ids, tenant))

    async def outputs(self) -> AsyncIterator[EngineOutputs | control.EndRequests]:
        """What the steps bring, those that wait together, and other fronts' orders, until `close`.

        Raises EngineDead when the core ends by itself.
        """
        while (outputs := await self._outputs.get()) is not None:
            yield outputs
        self._outputs.put(None)  # for whoever iterates again
        if self._error is not None and not self._closing:
            raise copy(self._error)

    async def call(self, verb: str, arguments: dict[str, Any] | None = None) -> Any:
        """Run the core's command `verb` and return its result. Raises OctavoError when it is refused."""
        call_id = next(self._call_ids)
        self._send(control.Call(call_id, verb, arguments or {}, self._front))
        self._replies[call_id] = asyncio.get_running_loop().create_future()
        try:
            result = await self._replies[call_id]
        finally:
            del self._replies[call_id]
        if verb in ("pause", "sleep"):
            self.standing[verb] = arguments or {}
        elif verb == "wake_up" and result:
            self.standing["sleep"] = {"parts": result}
        elif verb in ("wake_up", "resume"):
            self.standing = {}
        return result

    async def stand(self, standing: dict[str, dict[str, Any]]) -> None:
        """Have the core stand still or sleep by these commands; go on where there are none."""
        for verb, arguments in (standing or {"wake_up": {}}).items():
            await self.call(verb, arguments)

    def _begin(self) -> None:
        self._outputs = Backlog()
        self._unsent_aborts = []
        self._ready: asyncio.Future[control.Ready] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._error = None

    def _listen(self, mailbox: Mailbox) -> None:
        self._receiver: AsyncReceiver[control.FrontMessage] = AsyncReceiver(
            mailbox.address(control.front_pipe(self._front)), control.FrontMessage
        )
        self._reader = asyncio.create_task(self._read())

    async def _stop_listening(self) -> None:
        self._reader.cancel()
        await asyncio.wait([self._reader])
        self._receiver.close()

    def _send(self, message: control.CoreMessage) -> None:
        if self._error is not None:
            raise copy(self._error)
        self._hand_over(message)

    async def _read(self) -> None:
        """Task: every message of the core. Its own end is the engine's."""
        try:
            while True:
                try:
                    self._take(await self._receiver.receive())
                except BadFrame as error:
                    logger.warning("Dropped: %s", error)
        except Exception as error:
            logger.exception("The engine core's messages cannot be read any more.")
            self._lose(EngineDead(f"The engine core's messages cannot be read: {error}"))

    def _take(self, message: control.FrontMessage) -> None:
        match message:
            case EngineOutputs(life=life) if life != self._life:
                pass  # of a core that is gone, whose requests may have gone on in this one
            case EngineOutputs():
                self._outputs.put(message)
                if self._unsent_aborts and self._error is None:
                    self.abort([])
            case control.EndRequests():
                self._outputs.put(message)
            case control.Reply(call_id, result, error, kind):
                future = self._replies.get(call_id)
                if future is None or future.done():  # the caller has gone
                    return
                if error:
                    future.set_exception(control.refusal(error, kind))
                else:
                    future.set_result(result)
            case _:
                self._take_news(message)

    def _lose(self, error: OctavoError) -> None:
        """The core is gone, or of no use any more: end this life, once; all that waits fails."""
        if self._over.is_set():
            return
        self._over.set()
        self._error = error
        for future in (self._ready, *self._replies.values()):
            if not future.done():
                future.set_exception(copy(error))
        self._outputs.put(None)
