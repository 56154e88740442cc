"""`HttpServer`: accepts connections and keeps them within bounds; uvicorn speaks HTTP and WebSocket on each.

One per API process, made by `api_process`. It accepts by itself, because running out of file descriptors, or
having enough connections, must stop neither the server nor those who are connected already.
"""

import asyncio
import socket
import time
from email.utils import formatdate
from typing import Any

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from octavo.base.errors import ConfigError
from octavo.base.log import get_logger
from octavo.config.server import ServerConfig
from octavo.serving.process.connection import Connection

logger = get_logger(__name__)
_TICK_S = 1.0
_ACCEPT_RETRY_S = 0.1
_POLL_S = 0.02
_TURN_S = 0.001
"""For which a process leaves new connections to others: else the first to wake would take all that wait."""


class HttpServer:
    """All connections of one process."""

    def __init__(self, app: ASGIApp, config: ServerConfig, listener: socket.socket) -> None:
        """Raises ConfigError for certificates that cannot be used."""
        self._limits = config
        self._listener = listener
        self._state = ServerState()
        self._uvicorn = _uvicorn_config(app, config)
        self._tasks: list[asyncio.Task[None]] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._ssl = self._uvicorn.ssl

    def start(self) -> None:
        """Accept connections from now on; may be called twice."""
        self._tasks = self._tasks or [asyncio.create_task(self._accept()), asyncio.create_task(self._tick())]

    async def close(self, grace_s: float) -> None:
        """Accept no more and end what is idle; what is not idle within `grace_s` is cut."""
        await _cancel([*self._tasks, *self._opening])
        for connection in list(self._state.connections):
            connection.shutdown()
        deadline = time.monotonic() + grace_s
        while (self._state.connections or self._state.tasks) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        await _cancel(list(self._state.tasks))
        for connection in list(self._state.connections):
            connection.transport.abort()

    async def _accept(self) -> None:
        """Task: every client that knocks."""
        loop = asyncio.get_running_loop()
        num_failures = 0
        while True:
            if len(self._state.connections) + len(self._opening) >= self._limits.max_connections:
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                num_failures += 1
                if num_failures == 1:
                    logger.warning("No connection can be accepted: %s. Trying again.", error)
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            num_failures = 0
            task = loop.create_task(self._open(client))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
            if self._limits.api_server_count > 1:
                await asyncio.sleep(_TURN_S)

    async def _open(self, client: socket.socket) -> None:
        """Task: a connection, once its TLS handshake is done."""
        timeout_s = self._limits.header_timeout if self._ssl else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connection, client, ssl=self._ssl, ssl_handshake_timeout=timeout_s
            )
        except (OSError, EOFError) as error:
            logger.debug("A connection was not opened: %s", error)
            client.close()

    def _connection(self) -> Connection:
        return Connection(self._uvicorn, self._state, self._limits)

    async def _tick(self) -> None:
        """Task: once a second, the date in answers and the bounds in time of every connection."""
        while True:
            self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            now = time.monotonic()
            for connection in list(self._state.connections):
                if isinstance(connection, Connection):
                    connection.check(now)
            await asyncio.sleep(_TICK_S)


def _uvicorn_config(app: ASGIApp, config: ServerConfig) -> Config:
    """What uvicorn's protocols are told. Raises ConfigError for certificates that cannot be used."""
    uvicorn = Config(
        app,
        http=Connection,
        interface="asgi3",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=config.keep_alive_timeout,  # type: ignore[arg-type]  # any number of seconds
        ws_max_size=config.max_request_bytes,
        ssl_keyfile=config.ssl_keyfile or None,
        ssl_certfile=config.ssl_certfile or None,
        ssl_ca_certs=config.ssl_ca_certs or None,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_ciphers=config.ssl_ciphers or "DEFAULT",
    )
    try:
        uvicorn.load()
    except OSError as error:
        raise ConfigError(f"ssl_certfile, ssl_keyfile or ssl_ca_certs cannot be used: {error}.") from error
    return uvicorn


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)
