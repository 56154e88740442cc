"""The engine core in a process of its own, seen from an asyncio event loop."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from octavo.base.errors import ConfigError, EngineDead, OctavoError
from octavo.base.log import get_logger
from octavo.base.transport import AsyncReceiver, BadFrame
from octavo.config.engine import EngineConfig
from octavo.frontend.client.launch import CoreProcess
from octavo.messages.control import Abort, Call, CoreMessage, Failed, FrontMessage, Ready, Reply, Shutdown
from octavo.messages.request import EngineOutputs, EngineRequest

logger = get_logger(__name__)
_LAST_WORDS_S = 0.1
"""Between the end of the process and the verdict: its last messages may still be on their way."""


class AsyncClient:
    """One engine core, used from one event loop. After EngineDead only `close` may be called."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._outputs: asyncio.Queue[EngineOutputs | None] = asyncio.Queue()
        """None: nothing follows."""
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._error: OctavoError | None = None
        """Why the core is gone."""
        self._over = asyncio.Event()
        self._closing = False
        self._core: CoreProcess | None = None

    async def start(self) -> Ready:
        """Start the process and wait until the model is loaded.

        Raises the core's own ConfigError, or EngineDead; then nothing is left running.
        """
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._core = CoreProcess(self._config, self._notice_exit)
        self._receiver: AsyncReceiver[FrontMessage] = AsyncReceiver(self._core.address, FrontMessage)
        self._reader = asyncio.create_task(self._read())
        try:
            return await self._ready
        except BaseException:
            await self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the started core."""
        assert self._core is not None
        return self._core.pid

    def add(self, request: EngineRequest) -> None:
        """Hand over a request; it ends with exactly one finish reason in `outputs`.

        Raises EngineDead, and Overloaded when the core has stopped reading (nothing was done then).
        """
        self._send(request)

    def abort(self, request_ids: list[str]) -> None:
        """End these requests; unknown and finished ids are skipped. Raises EngineDead, Overloaded."""
        self._send(Abort(request_ids))

    async def outputs(self) -> AsyncIterator[EngineOutputs]:
        """What the steps bring, until `close`. Raises EngineDead when the core ends by itself."""
        while (outputs := await self._outputs.get()) is not None:
            yield outputs
        self._outputs.put_nowait(None)  # for whoever iterates again
        if self._error is not None and not self._closing:
            raise self._error

    async def call(self, verb: str, arguments: dict[str, Any] | None = None) -> Any:
        """Run the core's command `verb` and return its result. Raises OctavoError when it is refused."""
        call_id = next(self._call_ids)
        self._send(Call(call_id, verb, arguments or {}))
        self._replies[call_id] = self._loop.create_future()
        try:
            return await self._replies[call_id]
        finally:
            del self._replies[call_id]

    async def close(self, timeout_s: float = 5.0) -> None:
        """End the core: it aborts what is open; after `timeout_s` it is killed. May be called twice."""
        self._closing = True
        if self._core is None:
            return
        await asyncio.to_thread(self._core.end, timeout_s)
        await self._over.wait()
        self._reader.cancel()
        await asyncio.wait([self._reader])
        self._receiver.close()

    def _send(self, message: CoreMessage) -> None:
        if self._error is not None:
            raise self._error
        assert self._core is not None
        self._core.send(message)

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
            self._end(EngineDead(f"The engine core's messages cannot be read: {error}"))

    def _take(self, message: FrontMessage) -> None:
        match message:
            case EngineOutputs():
                self._outputs.put_nowait(message)
            case Reply(call_id, result, error):
                future = self._replies.get(call_id)
                if future is None or future.done():  # the caller has gone
                    return
                if error:
                    future.set_exception(OctavoError(error))
                else:
                    future.set_result(result)
            case Ready():
                if not self._ready.done():  # else the start was cancelled
                    self._ready.set_result(message)
            case Failed(error, is_config_error):
                self._end(ConfigError(error) if is_config_error else EngineDead(error))
            case Shutdown():
                self._end(EngineDead("The engine core has been shut down."))

    def _notice_exit(self, code: int) -> None:
        """On the thread that waits for the process."""
        with suppress(RuntimeError):  # the event loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._loop.call_later, _LAST_WORDS_S, self._verdict, code)

    def _verdict(self, code: int) -> None:
        self._end(EngineDead(f"The engine core ended unexpectedly with exit code {code}; its log says why."))

    def _end(self, error: OctavoError) -> None:
        """Fail what waits, once; the first cause counts."""
        if self._over.is_set():
            return
        self._over.set()
        self._error = error
        for future in (self._ready, *self._replies.values()):
            if not future.done():
                future.set_exception(error)
        self._outputs.put_nowait(None)
