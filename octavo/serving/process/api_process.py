"""`APIProcess`: one process that speaks HTTP, from its first connection to its last.

It serves, and ends when it is asked to (SIGTERM, SIGINT) or when the
engine is gone for good. Asked to end, it lets no new request in and waits for those under way; what is left
at the deadline, or at a second signal, ends with an error. A third signal kills.

`main_process` is the one that owns the engine, `extra_process` each of those beside it; how the engine comes
about is theirs.
"""

import asyncio
import gc
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from starlette.datastructures import State
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.base.log import get_logger
from octavo.base.registry import load_object
from octavo.config.server import ServerConfig
from octavo.serving.engines import Engines
from octavo.serving.errors import HTTPError, error_response
from octavo.serving.metrics_board import MetricsBoard
from octavo.serving.middleware.drain import Drain
from octavo.serving.middleware.stack import build_stack
from octavo.serving.process.http_server import HttpServer
from octavo.serving.process.listener import Listener
from octavo.serving.registry import load_routes

logger = get_logger(__name__)
T = TypeVar("T")
_MAKE_APP = "octavo.serving.app:make_app"
_GRACE_S, _HURRIED_GRACE_S = 5.0, 0.5
"""For the engine to end by itself."""
_LAST_WORDS_S = 1.0
"""For error events on their way once the engine has been shut down."""
_STARTING = HTTPError(503, "The server is starting: the model is being loaded.", headers={"Retry-After": "2"})


class APIProcess(ABC):
    """An API process."""

    _signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)
    """What asks it to end."""

    def __init__(self, config: ServerConfig, listener: Listener) -> None:
        """Raises ConfigError for certificates that cannot be used."""
        self._config = config
        self._listener = listener
        self._app = self._layers(error_response(_STARTING))
        self._http = HttpServer(self._answer, config, listener.socket)
        self._engines: Engines | None = None
        self._state: State | None = None
        """Of the application."""
        self._tasks: list[asyncio.Task[None]] = []
        """What `_open` began."""

    @abstractmethod
    def _make_engines(self) -> Engines:
        """The engines, not started; called on a thread of its own, as it may take long."""

    @abstractmethod
    def _open(self, engines: Engines, state: State) -> None:
        """The engines have started and requests are let in: begin what else there is to do.

        state: of the application
        """

    async def run(self) -> None:
        """Serve until asked to end. Raises ConfigError when the engine cannot start, EngineDead."""
        asked, hurried = _watch_signals(self._signals)
        serving = asyncio.create_task(self._serve())
        try:
            await _first_of([serving, asyncio.create_task(asked.wait())])
            if serving.done():
                serving.result()
            # While there is no engine no request can be under way.
            deadline_s = self._engines.shutdown_timeout if self._engines is not None else 0.0
            await _first_of(map(asyncio.create_task, (self._drained(), hurried.wait())), deadline_s)
        finally:
            serving.cancel()
            await self._end(_HURRIED_GRACE_S if hurried.is_set() else _GRACE_S)

    async def _serve(self) -> None:
        """Task: until the engine is gone for good."""
        engines = self._engines = await _on_thread(self._make_engines)
        _, make_app = await asyncio.gather(engines.start(), _on_thread(_load_app))
        app = make_app(engines, self._config)
        self._state = app.state
        await self._prepare(app.state)
        gc.collect()
        gc.freeze()  # what stays as long as the server need not be looked through again and again
        self._app = self._layers(app, app.state.metrics_board)
        self._http.start()
        self._open(engines, app.state)
        raise await engines.wait_until_dead()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _prepare(self, state: State) -> None:
        """What is to be done before requests are let in."""
        await state.store.open()

    async def _drained(self) -> None:
        """Let nothing new in, and return when all is done."""
        logger.info("Asked to end: %d requests under way are finished first.", self._drain.num_open)
        self._drain.begin()
        await self._drain.wait()
        if self._state is not None:
            await self._state.background.drained()

    async def _end(self, grace_s: float) -> None:
        """What is still open ends with an error; then nothing of this service is left."""
        for task in self._tasks:
            task.cancel()
        if self._state is not None:
            self._state.background.end()
        if self._engines is not None:
            await self._engines.shutdown(grace_s)
        await self._http.close(_LAST_WORDS_S)
        if self._state is not None:
            await self._state.store.close()

    def _layers(self, inner: ASGIApp, board: MetricsBoard | None = None) -> ASGIApp:
        stack = build_stack(inner, self._config, is_loopback=self._listener.is_loopback, board=board)
        self._drain: Drain = stack.drain
        return stack.app


def _load_app() -> Callable[[Engines, ServerConfig], Any]:
    """`make_app`, and all routes: half a second of imports, while the core loads its model."""
    list(load_routes())
    make_app: Callable[[Engines, ServerConfig], Any] = load_object(_MAKE_APP)
    return make_app


def _watch_signals(signals: Iterable[signal.Signals]) -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first signal, and by the second; a third does what it does to any process."""
    loop, asked, hurried = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def notice() -> None:
        if asked.is_set():
            hurried.set()
            for number in signals:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL)
        asked.set()

    for number in signals:
        loop.add_signal_handler(number, notice)
    return asked, hurried


async def _first_of(tasks: Iterable[asyncio.Task[Any]], timeout_s: float | None = None) -> None:
    """Return when one of these is done, or the time is over."""
    await asyncio.wait(list(tasks), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _on_thread(function: Callable[[], T]) -> T:
    """Its result. The thread does not keep the process alive, as one of an executor's would."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(function())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, name="make-engine", daemon=True).start()
    return await asyncio.wrap_future(result)
